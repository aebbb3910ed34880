"""Norm, activation and embedding of one decode step, and what all kernels share: Triton on CUDA, the same in PyTorch
elsewhere (tests compare the two formulas)."""

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
    def _embed_kernel(ids_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
        begin(PDL)
        row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = columns < width
        values = tl.load(table_ptr + tl.load(ids_ptr + row) * width + columns, mask=inside, other=0.0)
        tl.store(out_ptr + row * width + columns, values.to(tl.float32), mask=inside)

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


# Up to so many rows a norm is quicker with twice the warps (3 % of a layer of 32 rows of a 1B model).
FEW_ROWS = 64
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
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rounds: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`residual += delta` in place, then its RMS norm in the type of `weight`.

    Args:
        residual: `[R, H]`, float32.
        delta: `[R, H]`, or summands of it `[S, R, H]`; their sum is rounded to the type of `weight`.
        weight: `[H]`.
        eps: of the norm.
        rounds: round the sum to the type of `weight` too (and keep it in float32); without `delta` nothing is rounded.
        out: `[R, H]`, to be written and returned.
    """
    summands = 0 if delta is None else delta.numel() // residual.numel()
    if not uses_triton(residual):
        if delta is not None:
            residual += delta.reshape(summands, *residual.shape).float().sum(0).to(weight.dtype)
            if rounds:
                residual.copy_(residual.to(weight.dtype))
        scaled = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps)
        return torch.mul(weight, scaled.to(weight.dtype), out=out)
    out, width = torch.empty_like(residual, dtype=weight.dtype) if out is None else out, residual.shape[-1]
    _add_rms_norm_kernel[(len(residual),)](
        residual, delta if delta is not None else residual, weight, out, len(residual), width, eps,
        SUMMANDS=summands, ROUND=rounds, BLOCK=triton.next_power_of_2(width),
        num_warps=16 if len(residual) <= FEW_ROWS else 8, **launch_options(),
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


def embed(ids: torch.LongTensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` `[K, H]` in float32: `[R]` -> `[R, H]`, a tensor of its own."""
    if not uses_triton(table):
        return F.embedding(ids, table).float()
    out, width = table.new_empty(len(ids), table.shape[1], dtype=torch.float32), table.shape[1]
    _embed_kernel[(len(ids),)](
        ids, table, out, width, BLOCK=triton.next_power_of_2(width), num_warps=8, **launch_options()
    )
    return out


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` with a float32 result, `[R, K]`: it is accumulated in float32 and not rounded."""
    if x.device.type == "cuda" and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()
