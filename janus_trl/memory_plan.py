"""What a GRPO run will need on each GPU, by phase of a step, from configurations alone.

Sources: DeepSpeed 0.19 `runtime/zero/stage3.py` for what ZeRO holds (bf16 weights and gradients 2 + 2, float32 master
weights and Adam states 4 + 8 bytes a trained parameter, all over N; Rajbhandari et al. 2020, arXiv 1910.02054, section
3.1), `engine_weights` for copies of weights, `rollout_memory` for caches, `memory_parts` for activations.
"""

from dataclasses import dataclass, field

from transformers import JanusConfig

from . import memory_parts as parts
from .engine_buffers import SLOT_MULTIPLE
from .engine_prefill import PREFILL_TOKENS
from .memory_setup import GIB, Machine, Run
from .rollout_memory import cache_bytes

PHASES = ("rollout", "reward", "loss", "update")
# Elements: DeepSpeed's defaults, which accelerate leaves as they are.
REDUCE_BUCKET, SUB_GROUP, MAX_LIVE = 500_000_000, 1_000_000_000, 1_000_000_000
# What a GPU needs beside PyTorch's tensors: context, matrix libraries, NCCL, fragments.
OUTSIDE_GIB = 2.0


@dataclass
class Plan:
    """Bytes on one GPU: name of an item -> phase -> bytes; `host` is of all processes of one machine together."""

    machine: Machine
    run: Run
    parameters: parts.Parameters
    items: dict[str, dict[str, int]] = field(default_factory=dict)
    host: int = 0

    def add(self, name: str, size: float, phases: tuple[str, ...] = PHASES) -> None:
        """Add `size` bytes to an item in some phases."""
        item = self.items.setdefault(name, dict.fromkeys(PHASES, 0))
        for phase in phases:
            item[phase] += int(size)

    def total(self, phase: str) -> int:
        """Bytes in a phase."""
        return sum(item[phase] for item in self.items.values())

    @property
    def peak(self) -> int:
        """Bytes in the largest phase."""
        return max(map(self.total, PHASES))

    def lines(self, gpu_gib: float | None) -> list[str]:
        """A table in GiB, and whether it fits."""
        p, kind = self.parameters, f"LoRA rank {self.run.lora_rank}" if self.run.lora_rank else "full fine-tuning"
        counts = f"{p.trained:,} of {p.total + p.lora:,} parameters trained"
        table = [f"Planned GPU memory in GiB per GPU ({self.machine}; {kind}, {counts}):"]
        table.append(f"{'':<34}" + "".join(f"{phase:>9}" for phase in PHASES))
        rows = [(name, [item[phase] for phase in PHASES]) for name, item in self.items.items() if any(item.values())]
        for name, sizes in [*rows, ("total", [self.total(phase) for phase in PHASES])]:
            table.append(f"{name:<34}" + "".join(f"{size / GIB:>9.2f}" for size in sizes))
        if self.host:
            table.append(f"Host memory of one machine for the optimizer: {self.host / GIB:.0f} GiB.")
        return [*table, self.verdict(gpu_gib)]

    def verdict(self, gpu_gib: float | None) -> str:
        """Whether the largest phase fits, and what would make it."""
        need = self.peak / GIB + OUTSIDE_GIB
        phase = max(PHASES, key=self.total)
        said = f"Peak {self.peak / GIB:.1f} GiB in {phase}, about {need:.1f} GiB with the CUDA context and fragments"
        if gpu_gib is None:
            return f"{said}. No GPU is visible: --gpu_memory_gib 80 compares with one."
        if need <= gpu_gib:
            return f"{said}: fits into {gpu_gib:.0f} GiB."
        return f"{said}: does NOT fit into {gpu_gib:.0f} GiB. {self.advice(phase)}"

    def advice(self, phase: str) -> str:
        """Settings that lower a phase, those with the largest effect first."""
        run, ways = self.run, []
        if phase == "rollout" and (run.rollout_batch_size or run.rows) > 1:
            ways.append(f"rollout_batch_size: {max(1, min(run.rollout_batch_size or run.rows, run.rows) // 2)}")
        if phase != "rollout" and run.keep_buffers:
            ways.append("keep_rollout_buffers: false")
        if phase == "loss" and not run.checkpointing:
            ways.append("gradient_checkpointing: true")
        if phase == "loss" and run.micro_batch > 1:
            ways.append(f"per_device_train_batch_size: {run.micro_batch // 2} with twice the accumulation")
        if self.machine.zero_stage < 3 and not run.lora_rank:
            ways.append("ACCELERATE=zero3 with more GPUs")
        elif not run.lora_rank:
            ways.append("more GPUs, ACCELERATE=zero3_offload")
        return "Try " + ", or ".join([*ways, "use_peft: true"] if not run.lora_rank else ways or ["more memory"]) + "."


def plan_memory(config: JanusConfig, run: Run, machine: Machine) -> Plan:
    """The plan of a run of `config`'s model on each GPU of `machine`."""
    trains = run.trains or run.task
    text = trains != "t2i" or run.text_length > 0
    counts = parts.count_parameters(config, trains, text, run.lora_rank, run.lora_targets)
    plan = Plan(machine, run, counts)
    _states(plan)
    _rollout(plan, config)
    _training(plan, config, text)
    plan.add("reward models", run.reward_bytes)
    return plan


def _states(plan: Plan) -> None:
    """Weights, gradients, optimizer, reference, and the buffers that go with them."""
    run, machine, p = plan.run, plan.machine, plan.parameters
    trained, stage, shards = p.trained, machine.zero_stage, machine.shards
    weight = 2 if stage and run.mixed else run.weight_bytes
    later = ("loss", "update")
    weights = (
        (weight * (p.total + p.lora)) if not run.lora_rank or stage else weight * p.total + run.lora_bytes * p.lora
    )
    plan.add("weights", 0 if machine.offload_weights else weights / shards)
    if run.reference and not run.lora_rank:
        plan.add("reference model", 0 if machine.offload_weights else weights / shards)
    if run.task == "t2i" and (stage or run.vq_bytes != weight):
        plan.add("picture decoder", run.vq_bytes * p.vq)
    if not stage:
        size = run.lora_bytes if run.lora_rank else weight
        plan.add("gradients", size * trained * (2 if machine.processes > 1 else 1), later)  # DDP's buckets
        plan.add("optimizer", 2 * size * trained)
        if run.mixed and weight == 4 and not run.lora_rank:
            plan.add("bf16 casts of autocast", 2 * trained, ("loss",))
        return
    per_gpu = trained / machine.processes
    if machine.offload_optimizer:
        plan.host = int((4 + 8 + 4 + weight) * trained)
        plan.add("gradients", 0)
    else:
        plan.add("gradients", weight * per_gpu)
        plan.add("optimizer", (4 + 8) * per_gpu)
        # The float32 gradient of one sub-group, made from a flat copy of the low-precision one; inside the last loss.
        group = min(SUB_GROUP, per_gpu) if stage == 3 else per_gpu
        plan.add("float32 gradients of a step", (4 + weight) * group, ("update",))
    plan.add("DeepSpeed buckets", weight * REDUCE_BUCKET)
    largest = weight * min(p.largest_trained, REDUCE_BUCKET)
    scattered = weight * min(REDUCE_BUCKET, trained) if machine.processes > 1 else 0
    plan.add("DeepSpeed buckets", largest + scattered, ("loss",))
    if stage == 3 and (machine.processes > 1 or machine.offload_weights):
        plan.add("gathered weights", weight * min(MAX_LIVE, p.total), ("loss", "reward"))


def _rollout(plan: Plan, config: JanusConfig) -> None:
    """Copies of weights, caches, and the working memory of sampling and decoding."""
    run, machine, p = plan.run, plan.machine, plan.parameters
    element = 2 if run.mixed or run.weight_bytes == 2 else 4
    phases = PHASES if run.keep_buffers else ("rollout",)
    rows = min(run.rollout_batch_size or run.rows, run.rows)
    guided = run.guided if run.sampled_guided is None else run.sampled_guided
    draws, streams = run.task == "t2i", 2 if guided else 1
    codes = config.vq_config.num_patches**2 if draws else 0
    slots = run.prompt_length + run.text_length + codes + 1
    slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
    table = config.vq_config.num_embeddings * config.text_config.hidden_size
    in_place = not (machine.zero_stage == 3 or run.weight_bytes != element and not machine.zero_stage)
    decoded = p.decoded - (0 if run.text_length else 2 * config.text_config.vocab_size * config.text_config.hidden_size)
    copies = (p.adapted if run.lora_rank else p.fused if machine.zero_stage else 0) + table if in_place else decoded
    # Under ZeRO-1 and 2 the fused matrices stay beside DeepSpeed's flat weights.
    plan.add("rollout copy of weights", element * copies, PHASES if in_place and not run.lora_rank else phases)
    plan.add("KV cache", rows * cache_bytes(config, slots, streams, element), phases)
    hidden, mlp = config.text_config.hidden_size, config.text_config.intermediate_size
    tokens = min(PREFILL_TOKENS, -(-rows // run.group) * run.prompt_length)
    # Embeddings, residual stream in float32, norm, and beside them attention (q, k and v, rotated q and k, its output
    # twice, the last layer's sum) or the MLP (gate and up, their product, the sum).
    prefill = tokens * element * (4 * hidden + max(8 * hidden, hidden + 3 * mlp))
    vocabulary = config.text_config.vocab_size if run.text_length else config.vq_config.num_embeddings
    step = rows * (3 * 4 * vocabulary + 6 * element * streams * (hidden + mlp))
    decoding = parts.vq_decoding_bytes(config, min(run.vq_batch_size, rows), run.vq_bytes) if draws else 0
    plan.add("working memory", max(prefill, step, decoding), ("rollout",))


def _training(plan: Plan, config: JanusConfig, text: bool) -> None:
    """Activations of replay and backward, and of the reference's forward."""
    run, machine = plan.run, plan.machine
    draws = run.task == "t2i"
    codes = config.vq_config.num_patches**2 if draws else 0
    length = run.prompt_length + run.text_length + (codes + 3 if draws else 0)
    low = run.mixed and (machine.zero_stage > 0 or run.weight_bytes == 2) or run.weight_bytes == 2
    batch = parts.Batch(
        rows=run.micro_batch,
        streams=2 if run.guided else 1,
        length=length,
        codes=codes,
        text=run.text_length + (2 if draws else 0),
        hidden_bytes=2 if low else 4,
        lora_bytes=(2 if machine.zero_stage else run.lora_bytes) if run.lora_rank else 0,
        checkpointing=run.checkpointing,
        detach=run.detach,
    )
    kept, layer = parts.backbone_bytes(config, batch)
    heads = parts.heads_bytes(config, batch, full=not run.lora_rank, text_head=text)
    plan.add("activations that wait", kept, ("loss",))
    if not draws:
        kept = parts.vision_bytes(config, -(-run.micro_batch // run.group), trained=not run.lora_rank)
        plan.add("activations that wait", kept, ("loss",))
    # The heads' tensors are gone when the first layer is recomputed.
    plan.add("working memory", max(layer, heads), ("loss",))
    if run.reference:
        plan.add("working memory", parts.forward_bytes(config, batch) + heads, ("reward",))
