"""Rotation and attention of one decode step, and the keys of a prefill: Triton on CUDA, the same in PyTorch elsewhere.

Rows keep their keys and values in slots 0 … length-1, without padding: slot and position are the same number, a row
reads its own keys only, and one captured graph serves every length.
"""

import torch
from torch.nn import functional as F
from transformers.utils import is_triton_available

from .kernels import LINE, launch_options, uses_triton

if is_triton_available():
    import triton
    import triton.language as tl

    from .kernels import begin, prefetch

    @triton.jit
    def _product(x, y, COMPILED: tl.constexpr):
        """A product that is rounded by itself: compilers would make one operation of it, its rounding and a sum."""
        if COMPILED:
            return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)
        return x * y

    @triton.jit
    def _rotate(pointers, partners, cos, sin, first_half, inside, COMPILED: tl.constexpr):
        """Rotary position embedding in the half-split form of Llama, rounded where transformers rounds."""
        x = tl.load(pointers, mask=inside, other=0.0)
        partner = tl.load(partners, mask=inside, other=0.0)
        partner = tl.where(first_half, -partner, partner).to(tl.float32)
        cos, sin = cos.to(x.dtype).to(tl.float32), sin.to(x.dtype).to(tl.float32)
        own = _product(x.to(tl.float32), cos, COMPILED).to(x.dtype)
        other = _product(partner, sin, COMPILED).to(x.dtype)
        return (own.to(tl.float32) + other.to(tl.float32)).to(x.dtype)

    @triton.jit
    def _attention_kernel(
        qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, lengths_ptr, prefix_rows_ptr, prefix_lengths_ptr, out_ptr,
        row_stride, head_stride, scale,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
        LINE: tl.constexpr, PDL: tl.constexpr, COMPILED: tl.constexpr,
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
        q = _rotate(q_ptr + d[None, :], q_ptr + partner[None, :], cos[None, :], sin[None, :], first_half[None, :], of_group, COMPILED)  # fmt: skip  # noqa: E501
        k_ptr = qkv + (HEADS + kv_head) * D
        k_new = _rotate(k_ptr + d, k_ptr + partner, cos, sin, first_half, d < D, COMPILED)
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

    @triton.jit
    def _fill_cache_kernel(
        qkv_ptr, cos_ptr, sin_ptr, cache_rows_ptr, rotated_ptr, keys_ptr, values_ptr, length, row_stride, head_stride,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, COMPILED: tl.constexpr,
    ):  # fmt: skip
        """One token and a block of its heads."""
        token = tl.program_id(0).to(tl.int64)
        head, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
        position, row = token % length, tl.load(cache_rows_ptr + token // length)
        partner, first_half = (d + D // 2) % D, d < D // 2
        cos = tl.load(cos_ptr + position * D + d)
        sin = tl.load(sin_ptr + position * D + d)
        x_ptr = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * D
        inside = head[:, None] < HEADS + KV_HEADS
        rotated = _rotate(x_ptr + d[None, :], x_ptr + partner[None, :], cos[None, :], sin[None, :], first_half[None, :], inside, COMPILED)  # fmt: skip  # noqa: E501
        tl.store(rotated_ptr + (token * (HEADS + KV_HEADS) + head[:, None]) * D + d[None, :], rotated, mask=inside)
        is_key = inside & (head[:, None] >= HEADS)
        slot = row * row_stride + (head[:, None] - HEADS) * head_stride + position * D + d[None, :]
        tl.store(keys_ptr + slot, rotated, mask=is_key)
        tl.store(values_ptr + slot, tl.load(x_ptr + KV_HEADS * D + d[None, :], mask=is_key, other=0.0), mask=is_key)


LOG2_E = 1.4426950408889634
# Stages and warps of the attention kernel, from a search on an H200 with heads of 128.
STAGES, WARPS = 2, 4
# Keys in a tile. As many as the replay's attention takes make the rounding equal (see the kernel); fewer are faster,
# by 7 % of a step where 32 rows of a 1B model hold 100 keys each.
REPLAY_TILE, FAST_TILE = 128, 64


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
    tile: int = REPLAY_TILE,
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
        tile: keys that the kernel takes at a time, `REPLAY_TILE` or `FAST_TILE`.

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
        HEADS=heads, KV_HEADS=kv_heads, D=width, BLOCK=tile, STAGES=STAGES, LINE=min(LINE, width),
        COMPILED=qkv.is_cuda, num_warps=WARPS, **launch_options(),
    )  # fmt: skip
    return out


def fill_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    sources: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries and keys of whole prompts, which start at slot 0, and put keys and values into the caches.

    Args:
        qkv: projections `[U, P, heads + 2 * kv_heads, D]`, contiguous.
        cos, sin: rotary tables by position, `[slots, D]`, float32.
        keys, values: caches `[R, kv_heads, slots, D]`, written in place.
        rows: cache rows to write, `[U]`, or as many as `sources`.
        sources: the prompt of each of `rows` (not on CUDA); by default they are one for one.

    Returns:
        Rotated queries and keys, and values: `[U, heads, P, D]`, `[U, kv_heads, P, D]` twice.
    """
    batch, length, count, width = qkv.shape
    kv_heads = keys.shape[1]
    heads = count - 2 * kv_heads
    if uses_triton(qkv):
        rotated, block = qkv.new_empty(batch, length, heads + kv_heads, width), 16
        _fill_cache_kernel[(batch * length, triton.cdiv(heads + kv_heads, block))](
            qkv, cos, sin, rows, rotated, keys, values, length, keys.stride(0), keys.stride(1),
            HEADS=heads, KV_HEADS=kv_heads, D=width, BLOCK=block, COMPILED=qkv.is_cuda, num_warps=4,
        )  # fmt: skip
    else:
        table = cos[:length].unsqueeze(1), sin[:length].unsqueeze(1)  # [P, 1, D]
        rotated = rotate(qkv[:, :, : heads + kv_heads], *table)
    parts = rotated[:, :, :heads], rotated[:, :, heads:], qkv[:, :, heads + kv_heads :]
    q, k, v = (part.transpose(1, 2) for part in parts)
    if not uses_triton(qkv):
        keys[rows, :, :length] = k if sources is None else k[sources]
        values[rows, :, :length] = v if sources is None else v[sources]
    return q, k, v
