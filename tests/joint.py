"""A batch of joint ids, and its scores."""

import torch

PROMPT, TEXT = 6, 3  # slots of the padded prompt, text ids of the longest reasoning


def joint_batch(model, seed: int = 0):
    """Three left-padded rows: text and codes, codes at once, text that ends in eos; `input_ids`, mask, labels."""
    special, v, n = model.special_ids, model.vocab_size, model.num_image_codes
    generator = torch.Generator().manual_seed(seed)

    def text(count):
        return torch.randint(10, v, (count,), generator=generator).tolist()

    def codes():
        return (v + torch.randint(0, model.config.vq_config.num_embeddings, (n,), generator=generator)).tolist()

    end = [special.end_of_image, special.eos[0]]
    rows = [
        ([special.bos, *text(5)], [*text(3), special.begin_of_image, *codes(), *end]),
        ([special.bos, *text(1)], [special.begin_of_image, *codes(), *end]),
        ([special.bos, *text(3)], [*text(1), special.eos[0], special.begin_of_image, *codes(), *end]),
    ]
    width = max(len(completion) for _, completion in rows)
    ids, mask, labels = [], [], []
    for prompt, completion in rows:
        left, right = PROMPT - len(prompt), width - len(completion)
        ids.append([special.pad] * left + prompt + completion + [special.pad] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
        labels.append([-100] * PROMPT + completion + [-100] * right)
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(labels)


def score(model, ids, mask, labels, **kwargs):
    return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **kwargs)
