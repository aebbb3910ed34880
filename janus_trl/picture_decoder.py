"""Image codes -> pictures, in chunks and in one precision, wherever pictures are made: rewards, grids, inference."""

import copy
from itertools import chain

import torch
from PIL import Image
from torch import nn
from trl.trainer.utils import maybe_gather_lm_head_ctx as gathered

from .modeling import JanusForInterleavedGeneration


class PictureDecoder:
    """The VQ decoder of a model; autocast around a call does not reach it.

    Args:
        model: the model whose codes are decoded.
        dtype: precision of the decoder. Where the model's weights have another one, a frozen copy of the VQ model is
            kept (Janus-Pro in float32: 0.3 GiB); None decodes with the weights as they are.
        batch_size: pictures at a time, which bounds the activations.
        keep_copy: keep a copy in any case, e.g. because the weights will be sharded or cast.
    """

    def __init__(
        self,
        model: JanusForInterleavedGeneration,
        dtype: torch.dtype | None = None,
        batch_size: int = 4,
        keep_copy: bool = False,
    ):
        vq = model.model.vqmodel
        same = dtype is None or next(vq.parameters()).dtype == dtype
        self.vq, self.batch_size = vq if same and not keep_copy else _frozen_copy(vq, dtype), batch_size

    @torch.no_grad()
    def __call__(self, codes: torch.LongTensor) -> list[Image.Image]:
        """Codes `[B, N]` -> B RGB pictures of the size in the config, values clamped to -1 … 1 and rounded."""
        self.vq.to(codes.device)
        # transformers reads the width of the codebook outside of its module call: a shard has none.
        with gathered(self.vq.quantize.embedding.weight), torch.autocast(codes.device.type, enabled=False):
            pixels = [self._pixels(part) for part in codes.split(self.batch_size)]
        return [Image.fromarray(picture) for part in pixels for picture in part.numpy()]

    def _pixels(self, codes: torch.LongTensor) -> torch.Tensor:
        pixels = self.vq.decode(codes).float().clamp(-1, 1).permute(0, 2, 3, 1)  # [B, S, S, 3]
        return ((pixels + 1) * 127.5).round().to(torch.uint8).cpu()


def _frozen_copy(vq: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of `vq` in eval mode, whole also where its weights are shards of ZeRO-3 (collective then)."""
    with gathered(*vq.parameters()):
        weights = {id(p): nn.Parameter(p.detach().to(dtype or p.dtype, copy=True), False) for p in vq.parameters()}
        for parameter in weights.values():
            # What TRL's gathering asks of every parameter under ZeRO-3; this one is whole.
            parameter.ds_status = _available()
        others = chain.from_iterable(module._buffers.values() for module in vq.modules())
        buffers = {id(b): b.to(dtype or b.dtype) if b.is_floating_point() else b for b in others if b is not None}
        return copy.deepcopy(vq, {**weights, **buffers}).eval()


def _available():
    try:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    except ImportError:
        return None
    return ZeroParamStatus.AVAILABLE
