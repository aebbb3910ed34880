"""Matrix products of one decode step: few rows, so that reading the weights is all the time they take.

cuBLAS starts its kernels one after another. These start before the kernel in front has ended (programmatic dependent
launch), fetch their first weights into the L2 cache meanwhile, and only then wait for their input. They also save
kernels: `silu(gate) * up` happens where gate and up are computed, and products that are split along K leave their
parts to the norm that follows, which adds them up in float32.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.utils import is_triton_available

from .kernels import LINE, launch_options, silu_mul, starts_early

if is_triton_available():
    import triton
    import triton.language as tl

    from .kernels import begin, prefetch

    @triton.jit
    def _linear_kernel(
        x_ptr, w_ptr, out_ptr, rows, N, K, per_split,
        ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
        GATED: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Columns n of `x @ w.T` over one part of K; the weights take the 64 rows that the matrix units want."""
        split = tl.program_id(1).to(tl.int64)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        k, r = tl.arange(0, BK), tl.arange(0, ROWS)
        w = w_ptr + n[:, None].to(tl.int64) * K + split * per_split
        up = w + N.to(tl.int64) * K
        if PDL:
            lines = tl.arange(0, BK // LINE)[None, :] * LINE
            prefetch(w + lines)
            if GATED:
                prefetch(up + lines)
        begin(PDL)
        x = x_ptr + r[None, :] * K + split * per_split + k[:, None]
        inside = (r < rows)[None, :]
        total = tl.zeros([BN, ROWS], tl.float32)
        total_up = tl.zeros([BN, ROWS], tl.float32)
        for start in tl.range(0, per_split, BK, num_stages=STAGES):
            part = tl.load(x + start, mask=inside, other=0.0)  # [BK, ROWS]
            total = tl.dot(tl.load(w + start + k[None, :]), part, total)
            if GATED:
                total_up = tl.dot(tl.load(up + start + k[None, :]), part, total_up)
        if GATED:
            gate = total.to(x_ptr.dtype.element_ty).to(tl.float32)
            gate = (gate * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty).to(tl.float32)
            total = gate * total_up.to(x_ptr.dtype.element_ty).to(tl.float32)
        result = total.to(out_ptr.dtype.element_ty)
        out = out_ptr + (split * rows + r[:, None]) * N + n[None, :]
        tl.store(out, tl.trans(result), mask=(r < rows)[:, None])


# More rows than this are cuBLAS's: it is as fast there, and the rows would take the place of weights in flight.
MOST_ROWS = 64
# Shared memory of a program that has a multiprocessor to itself, and of one of two; less than there is, so that the
# kernels behind find room. Measured on an H200, as are the depths.
ALONE_BYTES, SHARED_BYTES = 165_000, 100_000
DEPTH, MOST_STAGES = 128, 6


@dataclass(frozen=True)
class Tiling:
    """How one product is cut: `columns` of the result and `depth` of K at a time, K in `splits` parts."""

    columns: int
    depth: int
    splits: int
    stages: int


def tiling(rows: int, columns: int, depth: int, processors: int, gated: bool, may_split: bool) -> Tiling | None:
    """The tiling of `[rows, depth]` times `[depth, columns]`; None where the sizes do not fit (cuBLAS does it then).

    Few programs get a multiprocessor each and a deep pipeline; more than there are multiprocessors share one in twos.
    """
    width, rows_held = 64, max(16, 1 << (rows - 1).bit_length())
    if rows > MOST_ROWS or columns % width or depth % width:
        return None
    programs, splits = columns // width, 1
    while may_split and 2 * splits * programs <= processors and depth % (2 * splits * width) == 0:
        splits *= 2
    space = ALONE_BYTES if programs * splits <= processors else SHARED_BYTES
    for step in (DEPTH, DEPTH // 2):
        stages = space // (2 * step * ((2 if gated else 1) * width + rows_held))
        if depth // splits % step == 0 and stages >= 4:
            return Tiling(width, step, splits, min(stages, MOST_STAGES * DEPTH // step))
    return None


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`, `[R, K]` and `[N, K]` -> `[R, N]`."""
    tiles = _tiling(x, weight)
    return F.linear(x, weight) if tiles is None else run(x, weight, tiles)[0]


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` with gate and up one matrix `[2I, K]` -> `[R, I]`."""
    tiles = _tiling(x, weight, gated=True)
    return silu_mul(F.linear(x, weight)) if tiles is None else run(x, weight, tiles, gated=True)[0]


def partial_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Summands of `x @ weight.T` for `add_rms_norm`: `[S, R, N]` in float32, or cuBLAS's product `[R, N]`, rounded."""
    tiles = _tiling(x, weight, may_split=True)
    return F.linear(x, weight) if tiles is None else run(x, weight, tiles, dtype=torch.float32)


def run(x: torch.Tensor, weight: torch.Tensor, tiles: Tiling, gated: bool = False, dtype=None) -> torch.Tensor:
    """The product as `[splits, R, N]`."""
    (rows, depth), columns = x.shape, len(weight) // (2 if gated else 1)
    out = x.new_empty(tiles.splits, rows, columns, dtype=dtype)
    _linear_kernel[(columns // tiles.columns, tiles.splits)](
        x, weight, out, rows, columns, depth, depth // tiles.splits,
        ROWS=max(16, triton.next_power_of_2(rows)), BN=tiles.columns, BK=tiles.depth, STAGES=tiles.stages,
        GATED=gated, LINE=LINE, num_warps=4, **launch_options(),
    )  # fmt: skip
    return out


def _tiling(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, may_split: bool = False) -> Tiling | None:
    if not starts_early() or x.dtype.itemsize != 2:
        return None
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    return tiling(len(x), len(weight) // (2 if gated else 1), x.shape[1], processors, gated, may_split)
