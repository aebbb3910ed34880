"""Short GRPO runs on the random Janus: metrics, direction, reference model, what is trained."""

import math

import pytest
import torch
from peft import PeftModel
from transformers import JanusForConditionalGeneration

from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.sampling import encode_prompts
from janus_trl.trainable import trainable_table
from tests.grpo import lora, pictures_dataset, prompts_dataset, steps, weights

# ---- metrics and masks ----------------------------------------------------------------------------------------------


def test_images_never_count_as_truncated(trainer_of):
    trainer = trainer_of(mask_truncated_completions=True)
    trainer.train()
    (log,) = steps(trainer)
    assert log["reward"] == pytest.approx(0.25) and log["completions/clipped_ratio"] == 0
    assert log["grad_norm"] > 0.1
    assert log["completions/mean_length"] == 16  # codes only: the rest is forced


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_replay_equals_rollout_and_every_loss_has_a_gradient(trainer_of, loss_type):
    trainer = trainer_of(loss_type=loss_type, max_reasoning_length=3, temperature=0.7, image_temperature=1.3)
    trainer.train()
    (log,) = steps(trainer)
    assert 0 <= log["logps/drift_mean"] <= log["logps/drift_max"] < 1e-5
    assert log["grad_norm"] > 1e-2
    assert 0 < log["entropy/image"] < math.log(16) and 0 < log["entropy/text"] < math.log(109)
    assert log["time/rollout_s"] > 0 and log["time/loss_s"] > 0 and log["time/reward_s"] >= 0


@pytest.mark.parametrize("settings", [{"guidance_scale": 1.0}, {"guidance_scale": 5.0, "logp_guidance": "conditional"}])
def test_drift_is_rounding_under_every_kind_of_guidance(trainer_of, settings):
    trainer = trainer_of(max_reasoning_length=2, **settings)
    trainer.train()
    assert steps(trainer)[0]["logps/drift_max"] < 1e-5


def test_drift_shows_a_replay_at_another_guidance(trainer_of):
    trainer = trainer_of()
    trainer._guidance_scale = lambda mode: 3.0
    sampling = trainer.sampling_settings
    trainer.sampling_settings = lambda mode: type(s := sampling(mode))(**{**vars(s), "guidance_scale": 2.0})
    trainer.train()
    assert steps(trainer)[0]["logps/drift_max"] > 0.1


def test_completion_length_is_that_of_the_image_and_its_frame(trainer_of):
    trainer = trainer_of(max_reasoning_length=3)
    assert trainer.max_completion_length == trainer.args.max_completion_length == 3 + 16 + 3
    assert trainer_of(task="i2t").max_completion_length == 4


def test_text_in_an_answer_that_hits_the_limit_is_truncated(trainer_of):
    trainer = trainer_of(task="i2t")
    trainer.train()
    (log,) = steps(trainer)
    assert log["completions/clipped_ratio"] > 0 and "entropy/image" not in log and log["logps/drift_max"] < 1e-5


# ---- direction ------------------------------------------------------------------------------------------------------


def first_text_id(trainer) -> int:
    """The likeliest first id of the reasoning."""
    return trainer.sample(["q"], [0], trainer.sampling_settings(greedy=True)).completion_ids[0][0]


def log_prob_of(trainer, token: int) -> float:
    """Mean log-prob of a code at every image position, or of a text id at the first position, of a fixed batch."""
    model, special = trainer.model, trainer.model.special_ids
    prompt = encode_prompts(trainer.processing_class, ["q"])["input_ids"][0].tolist()
    is_code = token >= model.vocab_size
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(model.vocab_size, model.vocab_size + 16, (8, 16), generator=generator).tolist()
    ids = torch.tensor([[*prompt, *([] if is_code else [token]), special.begin_of_image, *row] for row in codes])
    labels = torch.full_like(ids, -100)
    if is_code:
        labels[:, -16:] = token
    else:
        labels[:, len(prompt)] = token
    with torch.no_grad():
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
    return (out.log_probs.sum() / out.label_mask.sum()).item()


@pytest.mark.parametrize(("kind", "sign"), [("code", 1), ("code", -1), ("text", 1)])
def test_twenty_steps_move_the_probability_of_a_rewarded_id_in_the_direction_of_the_reward(trainer_of, kind, sign):
    def share(completion_ids, **_):
        return [sign * ids.count(token) for ids in completion_ids]

    trainer = trainer_of(
        share, prompts_dataset(["q"] * 4), max_steps=20, per_device_train_batch_size=8, num_generations=8,
        max_reasoning_length=2 if kind == "text" else 0, guidance_scale=1.0, learning_rate=5e-3,
    )  # fmt: skip
    token = first_text_id(trainer) if kind == "text" else trainer.model.vocab_size + 5
    before = log_prob_of(trainer, token)
    trainer.train()
    change = sign * (log_prob_of(trainer, token) - before)
    rewards = [log["reward"] for log in steps(trainer)]
    assert change > 0.5
    assert sum(rewards[-5:]) > sum(rewards[:5])


# ---- reference model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peft", [False, True])
def test_kl_to_the_reference_is_exactly_zero_before_the_first_update(trainer_of, peft):
    trainer = trainer_of(beta=0.04, peft=lora() if peft else None, max_steps=3, max_reasoning_length=2)
    assert (trainer.ref_model is None) == peft
    if not peft:
        assert type(trainer.ref_model) is JanusForInterleavedGeneration
        assert not any(p.requires_grad for p in trainer.ref_model.parameters()) or not trainer.ref_model.training
    start = None if peft else {n: p.clone() for n, p in trainer.ref_model.named_parameters()}
    trainer.train()
    kl = [log["kl"] for log in steps(trainer)]
    assert kl[0] == 0 and kl[-1] > 1e-4
    if not peft:
        assert all(torch.equal(p, start[n]) for n, p in trainer.ref_model.named_parameters())


def test_with_lora_there_is_one_model_only(trainer_of, monkeypatch):
    built = []
    init = JanusForConditionalGeneration.__init__
    monkeypatch.setattr(
        JanusForConditionalGeneration, "__init__", lambda self, *a, **k: built.append(self) or init(self, *a, **k)
    )
    trainer_of(beta=0.04, peft=lora())
    assert len(built) == 1
    trainer_of(beta=0.04)
    assert len(built) == 3


def test_beta_with_a_model_built_in_memory_is_refused(trainer_of, model):
    model.config._name_or_path = ""
    with pytest.raises(ValueError, match=r"beta = 0.04 needs a reference model.*beta: 0.0"):
        trainer_of(model=model, beta=0.04)


def test_a_loaded_model_trains_as_its_folder_does(trainer_of, model):
    trainers = [trainer_of(), trainer_of(model=model)]
    for trainer in trainers:
        trainer.train()
    first, second = (steps(trainer)[0] for trainer in trainers)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)


def test_model_arguments_are_left_as_they_were(trainer_of):
    trainer = trainer_of(model_init_kwargs={"attn_implementation": "eager"}, beta=0.04)
    assert trainer.args.model_init_kwargs == {"attn_implementation": "eager"}
    assert trainer.model.config._attn_implementation == "eager"
    assert isinstance(trainer.args.to_json_string(), str)


# ---- what is trained ------------------------------------------------------------------------------------------------


TRAINED = {
    "t2i": {"language_model", "generation_embeddings", "generation_aligner", "generation_head", "lm_head"},
    "i2t": {"language_model", "vision_model", "aligner", "lm_head"},
}


def part_of(name: str) -> str:
    return name.split(".")[1] if name.startswith("model.") else name.split(".")[0]


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_exactly_the_parts_in_the_table_change(trainer_of, task):
    dataset = pictures_dataset((1, 1, 2, 1)) if task == "i2t" else None
    trainer = trainer_of(task=task, dataset=dataset, max_reasoning_length=3)
    without_gradient = []

    def look(optimizer, *_):
        groups = [p for group in optimizer.param_groups for p in group["params"]]
        without_gradient.extend(p for p in groups if p.grad is None)

    before = weights(trainer)
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(look)
    trainer.train()
    assert without_gradient == []  # DDP would stop over them
    changed = {part_of(name) for name, p in weights(trainer).items() if not torch.equal(p, before[name])}
    assert changed == TRAINED[task]
    table = dict(line.split(maxsplit=2)[::2] for line in trainable_table(trainer.model).splitlines()[1:])
    assert {name for name, state in table.items() if state == "trained"} == TRAINED[task]
    assert {name for name, state in table.items() if state == "frozen"} == table.keys() - TRAINED[task]
    in_optimizer = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not in_optimizer & {id(p) for p in trainer.model.model.vqmodel.parameters()}


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_every_adapter_learns_under_gradient_checkpointing_and_none_is_in_the_vision_tower(trainer_of, task):
    trainer = trainer_of(task=task, peft=lora(), gradient_checkpointing=True, max_reasoning_length=2)
    before = weights(trainer)
    trainer.train()
    b = {name: p for name, p in trainer.model.named_parameters() if "lora_B" in name}
    assert len(b) == 2 * 7 and all(p.abs().max() > 0 for p in b.values())
    assert all("model.language_model.layers." in name for name in before if "lora_" in name)
    frozen = [name for name in before if "lora_" not in name]
    assert all(torch.equal(before[name], p) for name, p in weights(trainer).items() if name in frozen)
    assert "LoRA (" in trainable_table(trainer.base_model).splitlines()[1]


def test_gradient_checkpointing_changes_nothing(trainer_of):
    norms = []
    for checkpointing in (False, True):
        trainer = trainer_of(gradient_checkpointing=checkpointing, max_reasoning_length=2)
        trainer.train()
        norms.append(steps(trainer)[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_dropout_of_adapters_does_not_reach_the_scores(trainer_of):
    trainer = trainer_of(peft=lora(lora_dropout=0.5), max_steps=3, learning_rate=1e-1)
    trainer.train()
    assert all(log["logps/drift_max"] < 1e-5 for log in steps(trainer))


def test_a_saved_adapter_loads_on_stock_janus_and_scores_the_same(trainer_of, janus_folder, tmp_path):
    trainer = trainer_of(peft=lora(), learning_rate=1e-1)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert "JanusForInterleaved" not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(stock, str(tmp_path / "adapter")).eval()
    ids = torch.randint(10, 100, (2, 6))
    with torch.no_grad():
        ours, theirs = trainer.model.eval()(input_ids=ids).logits, loaded(input_ids=ids).logits
        with loaded.disable_adapter():
            assert not torch.allclose(ours, loaded(input_ids=ids).logits)
    torch.testing.assert_close(ours, theirs)
