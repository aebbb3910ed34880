"""Kernels of one decode step: Triton on CUDA, the same in PyTorch elsewhere (tests compare the two formulas).

Rows keep their keys and values in slots 0 … length-1, without padding: slot and position are the same number, a row
reads its own keys only, and one captured graph serves every length.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from transformers.utils import is_triton_available

if is_triton_available():
    import triton
    import triton.language as tl

    @triton.jit
    def begin(PDL: tl.constexpr):
        """Let the next kernel start beside this one, and wait until the results of the one before are there."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def prefetch(pointers):
        """Ask for 128 bytes at each pointer to be brought into the L2 cache."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.uint64)], tl.int32, False, 1
        )

    @triton.jit
    def _add_rms_norm_kernel(
        residual_ptr, delta_ptr, weight_ptr, out_ptr, rows, width, eps,
        SUMMANDS: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < width
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        begin(PDL)
        x = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0)
        if SUMMANDS > 0:
            delta = tl.zeros([BLOCK], tl.float32)
            for i in tl.static_range(SUMMANDS):
                delta += tl.load(delta_ptr + (i * rows + row) * width + columns, mask=inside, other=0.0).to(tl.float32)
            x += delta.to(weight.dtype).to(tl.float32)
            if ROUND:
                x = x.to(weight.dtype).to(tl.float32)
            tl.store(residual_ptr + row * width + columns, x, mask=inside)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
        tl.store(
            out_ptr + row * width + columns,
            (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32),
            mask=inside,
        )

    @triton.jit
    def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
        begin(PDL)
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0)
        up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
        wide = gate.to(tl.float32)
        silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
        tl.store(out_ptr + row * width + columns, silu.to(tl.float32) * up.to(tl.float32), mask=inside)

    @triton.jit
    def _rotate(pointers, partners, cos, sin, first_half, inside):
        """Rotary position embedding in the half-split form of Llama, rounded where transformers rounds."""
        x = tl.load(pointers, mask=inside, other=0.0)
        partner = tl.load(partners, mask=inside, other=0.0)
        partner = tl.where(first_half, -partner, partner).to(tl.float32)
        cos, sin = cos.to(x.dtype).to(tl.float32), sin.to(x.dtype).to(tl.float32)
        own, other = (x.to(tl.float32) * cos).to(x.dtype), (partner * sin).to(x.dtype)
        return (own.to(tl.float32) + other.to(tl.float32)).to(x.dtype)

    @triton.jit
    def _attention_kernel(
        qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, lengths_ptr, prefix_rows_ptr, prefix_lengths_ptr, out_ptr,
        row_stride, head_stride, scale,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
        LINE: tl.constexpr, PDL: tl.constexpr,
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
        if PDL:  # the first keys, which no kernel of this step writes
            near = tl.minimum(tl.arange(0, BLOCK), length)
            owner = tl.where(near < prefix_length, prefix_row, row)
            lines = kv_head * head_stride + owner * row_stride + near * D
            lines = lines[:, None] + tl.arange(0, D // LINE)[None, :] * LINE
            prefetch(keys_ptr + lines)
            prefetch(values_ptr + lines)
        begin(PDL)
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

        # Online softmax (Milakov & Gimelshein 2018). p is rounded, and how depends on the largest score so far: tiles
        # of 128 keys in ascending order, the new token in the last one, are those of cuDNN's attention and of PyTorch's
        # memory-efficient one, which the replay runs on.
        score_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale  # [16]
        top = tl.full([16], -float("inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        mixed = tl.zeros([16, D], tl.float32)
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
            new_top = tl.where(start + BLOCK > length, tl.maximum(new_top, score_new), new_top)
            p = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, axis=1)
            mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new_top
        new_top = tl.maximum(top, score_new)
        p_new, shrink = tl.exp2(score_new - new_top), tl.exp2(top - new_top)
        total = total * shrink + p_new
        p_new = p_new.to(v_new.dtype).to(tl.float32)
        mixed = mixed * shrink[:, None] + p_new[:, None] * v_new.to(tl.float32)[None, :]
        out = out_ptr + (row * HEADS + kv_head * group + head[:, None]) * D + d[None, :]
        tl.store(out, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=of_group)


LOG2_E = 1.4426950408889634
# Of the attention kernel: keys in a tile (see there), stages and warps, from a search on an H200 with heads of 128.
KEYS_PER_TILE, STAGES, WARPS = 128, 2, 4
# Values of 16 bits in a line of the L2 cache.
LINE = 64
_early = False


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels run for this tensor."""
    return is_triton_available() and tensor.device.type == "cuda"


def can_start_early(tensor: torch.Tensor) -> bool:
    """Whether the device knows programmatic dependent launch (Hopper and later)."""
    return uses_triton(tensor) and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)


@contextmanager
def early_starts(enabled: bool) -> Iterator[None]:
    """Start each kernel beside the one before it (programmatic dependent launch). For steps that are being captured:
    what a kernel reads before it waits was written before the graph started."""
    global _early
    before, _early = _early, enabled
    try:
        yield
    finally:
        _early = before


def starts_early() -> bool:
    """Whether this is within `early_starts(True)`."""
    return _early


def launch_options() -> dict[str, bool]:
    """Keyword arguments of a launch under `early_starts`."""
    return {"PDL": True, "launch_pdl": True} if _early else {"PDL": False}


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, rounds: bool = False
) -> torch.Tensor:
    """`residual += delta` in place, then its RMS norm in the type of `weight`.

    Args:
        residual: `[R, H]`, float32.
        delta: `[R, H]`, or summands of it `[S, R, H]`; their sum is rounded to the type of `weight`.
        weight: `[H]`.
        eps: of the norm.
        rounds: round the new residual to the type of `weight` too (and keep it in float32).
    """
    summands = 0 if delta is None else delta.numel() // residual.numel()
    if not uses_triton(residual):
        if delta is not None:
            residual += delta.reshape(summands, *residual.shape).float().sum(0).to(weight.dtype)
        if rounds:
            residual.copy_(residual.to(weight.dtype))
        return weight * (residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)
    out, width = torch.empty_like(residual, dtype=weight.dtype), residual.shape[-1]
    _add_rms_norm_kernel[(len(residual),)](
        residual, delta if delta is not None else residual, weight, out, len(residual), width, eps,
        SUMMANDS=summands, ROUND=rounds, BLOCK=triton.next_power_of_2(width), num_warps=8, **launch_options(),
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[R, 2I]` -> `[R, I]`."""
    width = gate_up.shape[-1] // 2
    if not uses_triton(gate_up):
        gate, up = gate_up.split(width, -1)
        return F.silu(gate) * up
    out, block = gate_up.new_empty(len(gate_up), width), 1024
    _silu_mul_kernel[(len(gate_up), triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, num_warps=4, **launch_options()
    )
    return out


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` with a float32 result, `[R, K]`: it is accumulated in float32 and not rounded."""
    if x.device.type == "cuda" and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding as in transformers' Llama: `[..., D]` with float32 tables that broadcast to it.

    The tables are rounded to the type of `x`, and so are both products: with other roundings the log-probs of a
    bfloat16 rollout would be further from those of the replay.
    """
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


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
        HEADS=heads, KV_HEADS=kv_heads, D=width, BLOCK=KEYS_PER_TILE, STAGES=STAGES, LINE=min(LINE, width),
        num_warps=WARPS, enable_fp_fusion=False,  # a fused product and sum of the rotation would be rounded once
        **launch_options(),
    )  # fmt: skip
    return out
