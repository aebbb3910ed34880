"""Kernels of one decode step: Triton on CUDA, the same in PyTorch elsewhere (tests compare the two formulas).

Rows keep their keys and values in slots 0 … length-1, without padding: slot and position are the same number, a row
reads its own keys only, and one captured graph serves every length.
"""

import torch
from torch.nn import functional as F
from transformers.utils import is_triton_available

if is_triton_available():
    import triton
    import triton.language as tl

    @triton.jit
    def _add_rms_norm_kernel(residual_ptr, delta_ptr, weight_ptr, out_ptr, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0)
        if HAS_DELTA:
            x = x + tl.load(delta_ptr + row * width + columns, mask=inside, other=0.0)
            tl.store(residual_ptr + row * width + columns, x, mask=inside)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        tl.store(out_ptr + row * width + columns, (wide * scale).to(weight.dtype) * weight, mask=inside)

    @triton.jit
    def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0)
        up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
        wide = gate.to(tl.float32)
        tl.store(out_ptr + row * width + columns, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=inside)

    @triton.jit
    def _rotate(pointers, partners, cos, sin, first_half, inside):
        """Rotary position embedding in the half-split form of Llama, in float32 and rounded once."""
        x = tl.load(pointers, mask=inside, other=0.0)
        partner = tl.load(partners, mask=inside, other=0.0).to(tl.float32)
        partner = tl.where(first_half, -partner, partner)
        return (x.to(tl.float32) * cos + partner * sin).to(x.dtype)

    @triton.jit
    def _attention_kernel(
        qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, lengths_ptr, prefix_rows_ptr, prefix_lengths_ptr, out_ptr,
        row_stride, head_stride, scale,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """One row and one key head: its query heads fill the 16 rows that the matrix units want."""
        row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        group: tl.constexpr = HEADS // KV_HEADS
        length = tl.load(lengths_ptr + row)
        prefix_row, prefix_length = tl.load(prefix_rows_ptr + row), tl.load(prefix_lengths_ptr + row)
        d, head = tl.arange(0, D), tl.arange(0, 16)
        partner, first_half = (d + D // 2) % D, d < D // 2
        cos = tl.load(cos_ptr + length * D + d)
        sin = tl.load(sin_ptr + length * D + d)
        qkv = qkv_ptr + row * (HEADS + 2 * KV_HEADS) * D
        of_group = head[:, None] < group
        q_ptr = qkv + (kv_head * group + head[:, None]) * D
        q = _rotate(q_ptr + d[None, :], q_ptr + partner[None, :], cos[None, :], sin[None, :], first_half[None, :], of_group)  # fmt: skip  # noqa: E501
        k_ptr = qkv + (HEADS + kv_head) * D
        k_new = _rotate(k_ptr + d, k_ptr + partner, cos, sin, first_half, d < D)
        v_new = tl.load(qkv + (HEADS + KV_HEADS + kv_head) * D + d)
        keys = keys_ptr + kv_head * head_stride
        values = values_ptr + kv_head * head_stride
        tl.store(keys + row * row_stride + length * D + d, k_new)
        tl.store(values + row * row_stride + length * D + d, v_new)

        # Online softmax (Milakov & Gimelshein 2018); the new token is the first key.
        top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale  # [16]
        total = tl.full([16], 1.0, tl.float32)
        mixed = tl.zeros([16, D], tl.float32) + v_new.to(tl.float32)[None, :]
        for start in tl.range(0, length, BLOCK, num_stages=STAGES):
            slots = start + tl.arange(0, BLOCK)
            inside = slots < length
            # Rows of a group read the keys of their prompt at one place, which stays in the L2 cache.
            owner = tl.where(slots < prefix_length, prefix_row, row)
            offsets = owner[:, None] * row_stride + slots[:, None] * D + d[None, :]
            k = tl.load(keys + offsets, mask=inside[:, None], other=0.0)  # [BLOCK, D]
            v = tl.load(values + offsets, mask=inside[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [16, BLOCK]
            scores = tl.where(inside[None, :], scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            p = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, axis=1)
            mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new_top
        out = out_ptr + (row * HEADS + kv_head * group + head[:, None]) * D + d[None, :]
        tl.store(out, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=of_group)

    @triton.jit
    def _block_mass_kernel(logits_ptr, tops_ptr, masses_ptr, width, blocks, inverse_temperature, BLOCK: tl.constexpr):
        """Largest logit of each block of a row, and the sum of the exponentials below it."""
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + row * width + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        z = z * inverse_temperature
        top = tl.max(z, axis=0)
        tl.store(tops_ptr + row * blocks + block, top)
        tl.store(masses_ptr + row * blocks + block, tl.sum(tl.exp(z - top), axis=0))

    @triton.jit
    def _sample_kernel(
        logits_ptr, uniforms_ptr, step_ptr, steps, tops_ptr, masses_ptr, ids_ptr, logps_ptr,
        width, blocks, inverse_temperature, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ):  # fmt: skip
        """Inverse CDF: first the block, then the id in it. The last id of positive probability catches a target that
        rounding put at the total."""
        row = tl.program_id(0).to(tl.int64)
        b = tl.arange(0, BLOCKS)
        tops = tl.load(tops_ptr + row * blocks + b, mask=b < blocks, other=-float("inf"))
        masses = tl.load(masses_ptr + row * blocks + b, mask=b < blocks, other=0.0)
        top = tl.max(tops, axis=0)
        masses = masses * tl.exp(tops - top)
        total = tl.sum(masses, axis=0)
        target = tl.load(uniforms_ptr + row * steps + tl.load(step_ptr)) * total
        if GREEDY:
            block = tl.min(tl.where(tops == top, b, BLOCKS), axis=0)
        else:
            first = tl.min(tl.where(tl.cumsum(masses, axis=0) > target, b, BLOCKS), axis=0)
            block = tl.minimum(first, tl.max(tl.where(masses > 0, b, 0), axis=0))
        block = tl.minimum(block, blocks - 1)  # rows that are not finite have none
        columns = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + row * width + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        z = z * inverse_temperature
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


LOG2_E = 1.4426950408889634
# Of the attention kernel; the fastest of a search on an H200 with 32 heads of 128.
KEYS_PER_TILE, STAGES, WARPS = 64, 3, 2
LOGITS_PER_BLOCK = 2048


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels run for this tensor."""
    return is_triton_available() and tensor.device.type == "cuda"


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += delta` in place, then its RMS norm: all `[R, H]`."""
    if not uses_triton(residual):
        if delta is not None:
            residual += delta
        wide = residual.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)
    out, width = torch.empty_like(residual, dtype=weight.dtype), residual.shape[-1]
    _add_rms_norm_kernel[(len(residual),)](
        residual, delta if delta is not None else residual, weight, out, width, eps,
        HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[R, 2I]` -> `[R, I]`."""
    width = gate_up.shape[-1] // 2
    if not uses_triton(gate_up):
        gate, up = gate_up.split(width, -1)
        return F.silu(gate) * up
    out, block = gate_up.new_empty(len(gate_up), width), 1024
    _silu_mul_kernel[(len(gate_up), triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` with a float32 result, `[R, K]`: it is accumulated in float32 and not rounded."""
    if x.device.type == "cuda" and x.dtype != torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        out = F.linear(x, weight).float()
    return out if bias is None else out + bias


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding as in transformers' Llama: `[..., D]` with float32 tables that broadcast to it."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    prefix_rows: torch.Tensor,
    prefix_lengths: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Rotate the new token, put it into slot `length` of its row, and attend to slots 0 … length.

    Args:
        qkv: projections of the new token, `[R, (heads + 2 * kv_heads) * D]`.
        cos, sin: rotary tables by position, `[slots, D]`, float32.
        keys, values: caches `[R, kv_heads, slots, D]`, written in place.
        lengths: keys of each row before this step, `[R]`, int64.
        prefix_rows, prefix_lengths: the first `prefix_lengths` keys of a row stand in row `prefix_rows`, `[R]`, int64
            (CUDA; elsewhere every row holds its own keys).
        heads: query heads.

    Returns:
        Attention output `[R, heads * D]`.
    """
    rows, kv_heads, slots, width = keys.shape
    if not uses_triton(qkv):
        q, k, v = qkv.view(rows, -1, width).split([heads, kv_heads, kv_heads], 1)  # [R, heads, D] each
        table = cos[lengths].unsqueeze(1), sin[lengths].unsqueeze(1)
        row = torch.arange(rows, device=qkv.device)
        keys[row, :, lengths], values[row, :, lengths] = rotate(k, *table), v
        seen = torch.arange(slots, device=qkv.device) <= lengths.unsqueeze(1)  # [R, slots]
        out = F.scaled_dot_product_attention(
            rotate(q, *table).unsqueeze(2), keys, values, seen[:, None, None], enable_gqa=heads != kv_heads
        )
        return out.reshape(rows, heads * width)
    out = qkv.new_empty(rows, heads * width)
    _attention_kernel[(rows, kv_heads)](
        qkv, cos, sin, keys, values, lengths, prefix_rows, prefix_lengths, out,
        keys.stride(0), keys.stride(1), width**-0.5 * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, D=width, BLOCK=KEYS_PER_TILE, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def sample_step(
    logits: torch.Tensor, uniforms: torch.Tensor, step: torch.Tensor, temperature: float, greedy: bool
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Inverse-CDF sampling with the uniforms of one step: ids and log-probs, `[R]` each.

    Args:
        logits: `[R, K]`; ids with a hugely negative logit are never chosen.
        uniforms: `[R, steps]`, drawn ahead.
        step: the column to use, a tensor of one int64 (so that a captured graph can move on).
    """
    rows, width = logits.shape
    if uses_triton(logits):
        blocks = triton.cdiv(width, LOGITS_PER_BLOCK)
        tops, masses = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
        ids, logps = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)
        _block_mass_kernel[(rows, blocks)](
            logits, tops, masses, width, blocks, 1 / temperature, BLOCK=LOGITS_PER_BLOCK, num_warps=4
        )
        _sample_kernel[(rows,)](
            logits, uniforms, step, uniforms.shape[1], tops, masses, ids, logps, width, blocks, 1 / temperature,
            GREEDY=greedy, BLOCK=LOGITS_PER_BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
        )  # fmt: skip
        return ids, logps
    log_probs = (logits.float() / temperature).log_softmax(-1)
    if greedy:
        ids = log_probs.argmax(-1)
    else:
        ids = sample_ids(log_probs, uniforms.index_select(1, step.view(1)).squeeze(1))
    return ids, log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


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
