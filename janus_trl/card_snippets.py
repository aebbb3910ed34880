"""Python that a model card shows: it loads the model in plain transformers and PEFT, and draws or answers."""

from dataclasses import dataclass

PROMPT, QUESTION = "A red cat on a blue chair.", "What is in the picture?"


@dataclass
class Usage:
    """How a model is used as it was trained.

    Attributes:
        name: Hub id or folder of the model.
        base: Hub id of the base, for an adapter; None for a whole model.
        template: prompt template with `{prompt}`.
        guidance_scale: of image logits.
        reasoning_length: most text tokens before a picture.
        answer_length: most text tokens of an answer.
    """

    name: str
    base: str | None = None
    template: str = "{prompt}"
    guidance_scale: float = 5.0
    reasoning_length: int = 0
    answer_length: int = 256


def loading(usage: Usage) -> str:
    """Lines that load model and processor."""
    lines = [
        "import torch",
        "from PIL import Image",
        "from transformers import JanusForConditionalGeneration, JanusProcessor",
    ]
    load = f'JanusForConditionalGeneration.from_pretrained("{usage.base or usage.name}", dtype="auto")'
    if usage.base:
        lines.insert(2, "from peft import PeftModel")
        lines += ["", f"base = {load}", f'model = PeftModel.from_pretrained(base, "{usage.name}").get_base_model()']
    else:
        lines += ["", f"model = {load}"]
    return "\n".join([*lines, f'processor = JanusProcessor.from_pretrained("{usage.name}")'])


def drawing(usage: Usage) -> str:
    """Lines that draw a picture; with reasoning, transformers needs two calls."""
    # transformers runs guidance for scales above 1 alone, and fails at 1.
    scale = usage.guidance_scale if usage.guidance_scale > 1 else 1.000001
    reasoning = f"""
stop = [model.generation_config.generation_kwargs["boi_token_id"], processor.tokenizer.eos_token_id]
ids, begin_of_image = ids[:, :-1], ids[:, -1:]
text = model.generate(
    ids, attention_mask=torch.ones_like(ids), generation_mode="text", do_sample=True, top_k=0,
    max_new_tokens={usage.reasoning_length}, eos_token_id=stop,
)
text = text[:, :-1] if text[0, -1] in stop else text
print(processor.decode(text[0, ids.shape[1] :], skip_special_tokens=True))
ids = torch.cat([text, begin_of_image], 1)"""
    return f"""
prompt = {usage.template.replace("{prompt}", PROMPT)!r}
messages = [{{"role": "user", "content": [{{"type": "text", "text": prompt}}]}}]
text = processor.apply_chat_template(messages, add_generation_prompt=True)
ids = processor(text=text, generation_mode="image", return_tensors="pt")["input_ids"].to(model.device)\
{reasoning if usage.reasoning_length else ""}
codes = model.generate(
    ids, attention_mask=torch.ones_like(ids), generation_mode="image", do_sample=True, top_k=0, guidance_scale={scale}
)
pixels = model.decode_image_tokens(codes)[0].float().clamp(-1, 1)
Image.fromarray(((pixels + 1) * 127.5).round().byte().cpu().numpy()).save("picture.png")"""


def answering(usage: Usage) -> str:
    """Lines that answer a question about a picture."""
    return f"""
question = {usage.template.replace("{prompt}", QUESTION)!r}
messages = [{{"role": "user", "content": [{{"type": "image"}}, {{"type": "text", "text": question}}]}}]
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(text=text, images=[Image.open("picture.png")], return_tensors="pt").to(model.device, model.dtype)
answer = model.generate(**inputs, generation_mode="text", max_new_tokens={usage.answer_length})
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def snippet(usage: Usage, task: str | None) -> str:
    """A whole snippet for `task`; for both tasks if None: it draws a picture and asks about it."""
    parts = [loading(usage)]
    parts += [drawing(usage)] if task in ("t2i", None) else []
    parts += [answering(usage)] if task in ("i2t", None) else []
    return "\n".join(["```python", *parts, "```"])
