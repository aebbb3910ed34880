"""The memory plan against counts by hand, and what a dry run says."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import JanusConfig
from transformers.integrations import unset_hf_deepspeed_config
from trl import ModelConfig

from janus_trl import memory_parts as parts
from janus_trl.configs import JanusGRPOConfig
from janus_trl.memory_plan import PHASES, plan_memory
from janus_trl.memory_setup import GIB, Machine, Run
from janus_trl.modeling import JanusForInterleavedGeneration
from janus_trl.rollout_memory import cache_bytes
from janus_trl.scripts import grpo
from janus_trl.tiny import datasets as tiny_datasets
from tests.grpo import lora
from tests.joint import joint_batch, score

ROOT = Path(__file__).parent.parent
HIDDEN, LAYERS, MLP, VOCABULARY, CODES = 4096, 30, 11008, 102400, 576
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * MLP + 2 * HIDDEN
# Two linear layers around an activation: with biases from H to D and from D to the codebook, D = H in Janus-Pro-7B.
IMAGE_HEAD = HIDDEN * (HIDDEN + 1) + 16384 * (HIDDEN + 1)
CODE_EMBEDDINGS = 16384 * 8
ALIGNER = 8 * HIDDEN + HIDDEN + HIDDEN * (HIDDEN + 1)


@pytest.fixture(scope="module")
def janus_7b() -> JanusConfig:
    text = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": MLP, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "projection_dim": HIDDEN, "depth": 2}
    vq = {"embed_dim": 8, "num_embeddings": 16384, "projection_dim": HIDDEN, "image_token_embed_dim": HIDDEN}
    return JanusConfig(text_config=text, vision_config=vision, vq_config=vq, tie_word_embeddings=False)


def item(plan, name: str, phase: str) -> float:
    return plan.items.get(name, dict.fromkeys(PHASES, 0))[phase]


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_counts_of_a_7b_model_are_those_of_its_shapes(janus_7b):
    full = parts.count_parameters(janus_7b, "t2i", text=False)
    model = LAYERS * LAYER + HIDDEN + VOCABULARY * HIDDEN
    assert full.trained == model + IMAGE_HEAD + CODE_EMBEDDINGS + ALIGNER
    assert parts.count_parameters(janus_7b, "t2i", text=True).trained == full.trained + VOCABULARY * HIDDEN
    assert full.decoded == model + VOCABULARY * HIDDEN + IMAGE_HEAD + 16384 * HIDDEN
    assert full.fused == LAYERS * (3 * HIDDEN**2 + 2 * HIDDEN * MLP)
    assert full.adapted == full.lora == 0


def test_counts_within_a_zero3_run_are_those_outside_of_one(janus_7b, within_zero3):
    inside = parts.count_parameters(janus_7b, "t2i", text=True)
    unset_hf_deepspeed_config()
    assert inside == parts.count_parameters(janus_7b, "t2i", text=True)


def test_counts_of_adapters_are_those_of_peft(trainer_of, janus_folder):
    trainer = trainer_of(peft=lora())
    config = JanusConfig.from_pretrained(janus_folder)
    counts = parts.count_parameters(config, "t2i", text=False, lora_rank=2)
    assert counts.trained == counts.lora == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert counts.total == sum(
        p.numel() for p in JanusForInterleavedGeneration.from_pretrained(janus_folder).parameters()
    )
    some = parts.count_parameters(config, "t2i", False, 2, ("k_proj", "down_proj"))
    assert some.lora == 2 * 2 * (32 + 32 + 64 + 32)
    assert some.adapted == 2 * (3 * 32 * 32 + 32 * 64)  # the matrix that k is fused into, and down


# ---- what is held ---------------------------------------------------------------------------------------------------


def test_zero3_shards_16_bytes_a_trained_and_2_a_frozen_parameter(janus_7b):
    one, eight = (plan_memory(janus_7b, Run(), Machine(n, 3)) for n in (1, 8))
    p = one.parameters
    names = ("weights", "gradients", "optimizer")
    assert sum(item(one, name, "rollout") for name in names) == pytest.approx(2 * p.total + 14 * p.trained)
    assert 99 < 14 * p.trained / GIB + 2 * p.total / GIB < 101
    for name in names:
        assert item(eight, name, "rollout") == pytest.approx(item(one, name, "rollout") / 8, rel=1e-6)
    assert item(one, "gathered weights", "loss") == 0  # one process gathers nothing
    assert item(eight, "gathered weights", "loss") == 2 * 10**9
    no_text = p.decoded - 2 * VOCABULARY * HIDDEN  # text head and embeddings stay away where no text is sampled
    assert item(eight, "rollout copy of weights", "rollout") == 2 * no_text


def test_an_offloaded_optimizer_moves_master_weights_states_and_gradients_to_the_host(janus_7b):
    plan = plan_memory(janus_7b, Run(), Machine(2, 3, offload_optimizer=True))
    assert item(plan, "optimizer", "rollout") == item(plan, "gradients", "loss") == 0
    assert plan.host == 18 * plan.parameters.trained
    assert f"optimizer: {plan.host / GIB:.0f} GiB" in "\n".join(plan.lines(80))


def test_lora_holds_whole_weights_float32_adapters_and_copies_of_adapted_matrices(janus_7b):
    plan = plan_memory(janus_7b, Run(lora_rank=16, reference=True), Machine())
    p = plan.parameters
    assert item(plan, "weights", "loss") == 2 * p.total + 4 * p.lora
    assert item(plan, "gradients", "loss") == 4 * p.lora and item(plan, "gradients", "rollout") == 0
    assert item(plan, "optimizer", "rollout") == 8 * p.lora
    assert item(plan, "reference model", "rollout") == 0  # the model without its adapter
    assert item(plan, "rollout copy of weights", "loss") == 2 * (LAYERS * (LAYER - 2 * HIDDEN) + 16384 * HIDDEN)
    freed = plan_memory(janus_7b, Run(lora_rank=16, keep_buffers=False), Machine())
    assert item(freed, "rollout copy of weights", "loss") == item(freed, "KV cache", "loss") == 0


def test_a_reference_of_full_fine_tuning_is_sharded_with_the_weights(janus_7b):
    plan = plan_memory(janus_7b, Run(reference=True), Machine(8, 3))
    assert item(plan, "reference model", "loss") == item(plan, "weights", "loss")
    assert item(plan, "working memory", "reward") > 0


def test_plain_float32_training_keeps_16_bytes_and_casts_to_bf16(janus_7b):
    plan = plan_memory(janus_7b, Run(weight_bytes=4), Machine())
    p = plan.parameters
    assert item(plan, "gradients", "loss") == 4 * p.trained and item(plan, "optimizer", "loss") == 8 * p.trained
    assert item(plan, "bf16 casts of autocast", "loss") == 2 * p.trained
    on_two = plan_memory(janus_7b, Run(weight_bytes=4), Machine(2))
    assert item(on_two, "gradients", "loss") == 8 * p.trained  # and DDP's buckets


# ---- what grows with the batch --------------------------------------------------------------------------------------


def test_the_cache_has_whole_multiples_of_slots_for_the_rows_of_a_chunk(janus_7b):
    plan = plan_memory(janus_7b, Run(rollout_batch_size=32, prompt_length=32), Machine())
    assert item(plan, "KV cache", "rollout") == 32 * cache_bytes(janus_7b, 640, 2)  # 32 + 576 + 1 -> 640
    few = plan_memory(janus_7b, Run(rows=8, rollout_batch_size=32), Machine())
    assert item(few, "KV cache", "rollout") == 8 * cache_bytes(janus_7b, 640, 2)
    plain = plan_memory(janus_7b, Run(rollout_batch_size=32, guided=False), Machine())
    assert item(plain, "KV cache", "rollout") == item(plan, "KV cache", "rollout") / 2


def test_activations_grow_with_the_micro_batch_alone(janus_7b):
    name = "activations that wait"
    one, two, more = (
        plan_memory(janus_7b, Run(micro_batch=m, rows=rows), Machine(1, 3)) for m, rows in ((4, 64), (8, 64), (4, 256))
    )
    tokens = 4 * 2 * (32 + CODES + 3)
    assert item(one, name, "loss") == tokens * HIDDEN * 2 * (LAYERS + 2)  # a checkpoint a layer, and the embeddings
    assert item(two, name, "loss") == 2 * item(one, name, "loss") and item(more, name, "loss") == item(
        one, name, "loss"
    )
    without = plan_memory(janus_7b, Run(micro_batch=4, checkpointing=False), Machine(1, 3))
    assert item(without, name, "loss") > 10 * item(one, name, "loss")
    detached = plan_memory(janus_7b, Run(micro_batch=4, detach=True), Machine(1, 3))
    assert item(detached, name, "loss") == item(one, name, "loss") / 2


def test_checkpoints_are_those_that_autograd_keeps(model):
    """Hidden states that wait for the backward of the tiny model, next to the formula."""
    ids, mask, labels = joint_batch(model)
    model.train()
    model.gradient_checkpointing_enable()
    kept = {}

    def pack(tensor):
        if tensor.shape[-2:] == (ids.shape[1], 32) and tensor.dtype == torch.float32:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score(model, ids, mask, labels, guidance_scale=5.0)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    batch = parts.Batch(rows=3, streams=2, length=ids.shape[1], codes=16, text=3, hidden_bytes=4)
    planned, _ = parts.backbone_bytes(model.config, batch)
    assert planned == pytest.approx(found, rel=0.5)


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_the_verdict_compares_the_largest_phase_and_says_what_would_help(janus_7b):
    plan = plan_memory(janus_7b, Run(rollout_batch_size=32), Machine(8, 3))
    assert plan.peak == max(plan.total(phase) for phase in PHASES)
    assert "fits into 80 GiB" in plan.verdict(80)
    small = plan.verdict(24)
    assert "does NOT fit into 24 GiB" in small and "keep_rollout_buffers: false" in small
    assert "--gpu_memory_gib 80" in plan.verdict(None)
    rollout = plan_memory(janus_7b, Run(rows=64, keep_buffers=False), Machine(8, 3)).verdict(24)
    assert "in rollout" in rollout and "rollout_batch_size: 32" in rollout


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for split in tiny_datasets.SIZES:
        monkeypatch.setitem(tiny_datasets.SIZES, split, 32)
    values = {**yaml.safe_load((ROOT / "recipes/tiny/t2i.yaml").read_text()), "output_dir": str(tmp_path)}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**values, "per_device_train_batch_size": 32}))
    return str(path)


def test_a_dry_run_prints_the_plan_of_each_gpu(recipe, capsys):
    options = ["--dry_run", "true", "--num_processes", "2", "--accelerate_config", "zero3", "--gpu_memory_gib", "8"]
    grpo.main(["--config", recipe, *options])
    out = capsys.readouterr().out
    assert "Planned GPU memory in GiB per GPU (2 GPUs, ZeRO-3; full fine-tuning" in out
    assert "KV cache" in out and "fits into 8 GiB" in out
    for words in (["--accelerate_config", "cpu"], []):
        grpo.main(["--config", recipe, "--dry_run", "true", *words])
        out = capsys.readouterr().out
        assert "Planned GPU memory" not in out and ("No GPU here" in out) == (not words)


def test_an_unknown_accelerate_file_is_refused_with_the_nearest_name(recipe, capsys):
    with pytest.raises(SystemExit):
        grpo.main(["--config", recipe, "--dry_run", "true", "--accelerate_config", "zero_3"])
    message = capsys.readouterr().err
    assert "there is no file accelerate_configs/zero_3.yaml" in message and "Did you mean 'zero3'?" in message


def test_make_tells_the_dry_run_which_file_it_will_launch_with():
    line = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--dry_run true" in line]
    assert line and all('--accelerate_config "$$name"' in text for text in line)


def test_conditional_log_probs_are_sampled_from_both_streams(janus_7b, tmp_path):
    def caches(logp_guidance):
        args = JanusGRPOConfig(str(tmp_path), logp_guidance=logp_guidance, report_to="none", use_cpu=True)
        run = Run.of(args, ModelConfig(dtype="bfloat16"), 32, 32, 8)
        return plan_memory(janus_7b, run, Machine()).items["KV cache"]["rollout"]

    assert caches("conditional") == caches("guided")
