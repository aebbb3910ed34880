"""Sampling of one decode step: Triton on CUDA, the same in PyTorch elsewhere (tests compare the two)."""

import torch
from transformers.utils import is_triton_available

from .kernels import launch_options, uses_triton

if is_triton_available():
    import triton
    import triton.language as tl

    from .kernels import begin

    @triton.jit
    def _logits(logits_ptr, bias_ptr, row, columns, width, inverse_temperature, HAS_BIAS: tl.constexpr):
        z = tl.load(logits_ptr + row * width + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        return z * inverse_temperature

    @triton.jit
    def _block_mass_kernel(
        logits_ptr, bias_ptr, tops_ptr, masses_ptr, width, blocks, inverse_temperature,
        HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Largest logit of each block of a row, and the sum of the exponentials below it."""
        begin(PDL)
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        z = _logits(logits_ptr, bias_ptr, row, columns, width, inverse_temperature, HAS_BIAS)
        top = tl.max(z, axis=0)
        tl.store(tops_ptr + row * blocks + block, top)
        tl.store(masses_ptr + row * blocks + block, tl.sum(tl.exp(z - top), axis=0))

    @triton.jit
    def _sample_kernel(
        logits_ptr, bias_ptr, uniforms_ptr, step_ptr, steps, tops_ptr, masses_ptr, ids_ptr, logps_ptr,
        all_ids_ptr, all_logps_ptr, width, blocks, inverse_temperature,
        HAS_BIAS: tl.constexpr, GREEDY: tl.constexpr, RECORD: tl.constexpr,
        BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Inverse CDF: first the block, then the id in it. The last id of positive probability catches a target that
        rounding put at the total."""
        begin(PDL)
        row = tl.program_id(0).to(tl.int64)
        b = tl.arange(0, BLOCKS)
        tops = tl.load(tops_ptr + row * blocks + b, mask=b < blocks, other=-float("inf"))
        masses = tl.load(masses_ptr + row * blocks + b, mask=b < blocks, other=0.0)
        top = tl.max(tops, axis=0)
        masses = masses * tl.exp(tops - top)
        total = tl.sum(masses, axis=0)
        column = row * steps + tl.load(step_ptr)
        target = tl.load(uniforms_ptr + column) * total
        if GREEDY:
            block = tl.min(tl.where(tops == top, b, BLOCKS), axis=0)
        else:
            first = tl.min(tl.where(tl.cumsum(masses, axis=0) > target, b, BLOCKS), axis=0)
            block = tl.minimum(first, tl.max(tl.where(masses > 0, b, 0), axis=0))
        block = tl.minimum(block, blocks - 1)  # rows that are not finite have none
        columns = block * BLOCK + tl.arange(0, BLOCK)
        z = _logits(logits_ptr, bias_ptr, row, columns, width, inverse_temperature, HAS_BIAS)
        if GREEDY:
            chosen = tl.min(tl.where(z == top, columns, width), axis=0)
        else:
            p = tl.exp(z - top)
            cdf = tl.sum(tl.where(b < block, masses, 0.0), axis=0) + tl.cumsum(p, axis=0)
            first = tl.min(tl.where(cdf > target, columns, width), axis=0)
            chosen = tl.minimum(first, tl.max(tl.where(p > 0, columns, 0), axis=0))
        chosen = tl.minimum(chosen, width - 1)
        logp = tl.sum(tl.where(columns == chosen, z, 0.0), axis=0) - top - tl.log(total)
        tl.store(ids_ptr + row, chosen.to(tl.int64))
        tl.store(logps_ptr + row, logp)
        if RECORD:
            tl.store(all_ids_ptr + column, chosen.to(tl.int64))
            tl.store(all_logps_ptr + column, logp)

    @triton.jit
    def _advance_kernel(
        ids_ptr, logps_ptr, step_ptr, steps, alive_ptr, counts_ptr, going_ptr, fed_ptr, all_ids_ptr, all_logps_ptr,
        eos_ptr, eos_count, opener, pad, rows, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        begin(PDL)
        row = tl.arange(0, BLOCK)
        inside = row < rows
        chosen = tl.load(ids_ptr + row, mask=inside, other=0)
        logp = tl.load(logps_ptr + row, mask=inside, other=0.0)
        alive = tl.load(alive_ptr + row, mask=inside, other=0) != 0
        step = tl.load(step_ptr)
        column = row.to(tl.int64) * steps + step
        tl.store(all_ids_ptr + column, tl.where(alive, chosen, pad), mask=inside)
        tl.store(all_logps_ptr + column, tl.where(alive, logp, 0.0), mask=inside)
        counts = tl.load(counts_ptr + row, mask=inside, other=0)
        tl.store(counts_ptr + row, counts + alive.to(tl.int64), mask=inside)
        ends = chosen < 0
        for i in range(eos_count):
            ends = ends | (chosen == tl.load(eos_ptr + i))
        if opener >= 0:
            fed = alive & (chosen != opener)
        else:
            fed = alive & (ends == 0)
        alive = fed & (ends == 0)
        tl.store(fed_ptr + row, fed.to(tl.int8), mask=inside)
        tl.store(alive_ptr + row, alive.to(tl.int8), mask=inside)
        tl.store(going_ptr, tl.max(alive.to(tl.int32), axis=0).to(tl.int8))
        tl.debug_barrier()  # every warp has read the step
        tl.store(step_ptr, step + 1)


LOGITS_PER_BLOCK = 2048


def sample_step(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    uniforms: torch.Tensor,
    step: torch.Tensor,
    temperature: float,
    greedy: bool,
    record: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Inverse-CDF sampling with the uniforms of one step: ids and log-probs, `[R]` each.

    Args:
        logits: `[R, K]`.
        bias: `[K]`, added to them; ids with a hugely negative logit are never chosen.
        uniforms: `[R, steps]`, drawn ahead.
        step: the column to use, a tensor of one int64 (so that a captured graph can move on).
        temperature: the biased logits are divided by it.
        greedy: take the largest logit, the first of several.
        record: ids and log-probs `[R, steps]` whose column of this step is written too.
    """
    rows, width = logits.shape
    if uses_triton(logits):
        blocks = triton.cdiv(width, LOGITS_PER_BLOCK)
        tops, masses = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
        ids, logps = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)
        options = {"HAS_BIAS": bias is not None, "BLOCK": LOGITS_PER_BLOCK, "num_warps": 4, **launch_options()}
        bias = logits if bias is None else bias
        _block_mass_kernel[(rows, blocks)](logits, bias, tops, masses, width, blocks, 1 / temperature, **options)
        _sample_kernel[(rows,)](
            logits, bias, uniforms, step, uniforms.shape[1], tops, masses, ids, logps, *(record or (ids, logps)),
            width, blocks, 1 / temperature,
            GREEDY=greedy, RECORD=record is not None, BLOCKS=triton.next_power_of_2(blocks), **options,
        )  # fmt: skip
        return ids, logps
    logits = logits.float() if bias is None else logits.float() + bias
    log_probs = (logits / temperature).log_softmax(-1)
    if greedy:
        ids = log_probs.argmax(-1)
    else:
        ids = sample_ids(log_probs, uniforms.index_select(1, step.view(1)).squeeze(1))
    logps = log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if record is not None:
        for column, values in zip(record, (ids, logps), strict=True):
            column.index_copy_(1, step.view(1), values.unsqueeze(1))
    return ids, logps


def advance_text(
    ids: torch.LongTensor,
    logps: torch.Tensor,
    step: torch.Tensor,
    alive: torch.Tensor,
    counts: torch.Tensor,
    going: torch.Tensor,
    record: tuple[torch.Tensor, torch.Tensor],
    eos: torch.LongTensor,
    opener: int | None,
    pad: int,
) -> torch.Tensor:
    """After the sampling of a text id: note it, and see which rows end. In place, but for what is returned.

    Args:
        ids, logps: what was sampled, `[R]`; of rows that ended before, `pad` and 0 are noted.
        step: the column to write, a tensor of one int64; afterwards the next one.
        alive: rows that go on, `[R]`, bool.
        counts: ids of each row, `[R]`.
        going: whether any row goes on, a tensor of one bool.
        record: ids and log-probs `[R, steps]`.
        eos: ids that end a row, `[E]`.
        opener: `<begin_of_image>` where a text may open an image, else None. It ends the row and is not fed, because
            the image begins with it; an eos before it is fed.
        pad: see `ids`.

    Returns:
        The rows whose id the model gets to see, `[R]`, bool.
    """
    if uses_triton(ids):
        fed, rows = torch.empty_like(alive), len(ids)
        _advance_kernel[(1,)](
            ids, logps, step, record[0].shape[1], alive.view(torch.int8), counts, going.view(torch.int8),
            fed.view(torch.int8), *record,
            eos, len(eos), -1 if opener is None else opener, pad, rows,
            BLOCK=triton.next_power_of_2(rows), num_warps=4, **launch_options(),
        )  # fmt: skip
        return fed
    for column, values in zip(record, (ids.masked_fill(~alive, pad), logps.masked_fill(~alive, 0)), strict=True):
        column.index_copy_(1, step.view(1), values.unsqueeze(1))
    counts += alive
    ends = (ids.unsqueeze(1) == eos).any(1)
    fed = alive & ~(ids == opener if opener is not None else ends)
    alive.copy_(fed & ~ends)
    going.copy_(alive.any())
    step += 1
    return fed


def sample_ids(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.LongTensor:
    """Inverse-CDF sampling: `[B, K]` log-probs (float32) and `[B]` uniforms -> `[B]` ids.

    The target is kept below the total, so that an id of probability 0 is never chosen whatever the rounding. Rows
    that are not finite give the last id: `rollout` refuses their log-probs, and an index must not fail before.
    """
    cdf = log_probs.exp().cumsum(-1)
    total = cdf[:, -1]
    target = torch.minimum(uniforms.to(cdf) * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cdf, target.unsqueeze(-1), right=True).squeeze(-1)
    return ids.clamp(max=log_probs.shape[-1] - 1)
