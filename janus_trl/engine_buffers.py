"""What the decode engine reads and writes: weights, caches and the state of a step, at addresses that stay."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .engine_weights import EngineWeights
from .modeling import JanusForInterleavedGeneration

# Slots of the caches come in multiples of this, so that prompts of other lengths find room in the same buffers.
SLOT_MULTIPLE = 128


def supports(model: JanusForInterleavedGeneration) -> bool:
    """Whether the language model is a plain Llama that the kernels take.

    Without biases; the head size a power of two, 16 or more on a GPU; at most 16 query heads to a key head.
    """
    config = model.config.text_config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if model.lm_head.weight.device.type == "cuda" and width < 16:  # the least that the matrix units take
        return False
    if config.num_attention_heads > 16 * config.num_key_value_heads:  # one tile holds the queries of a key head
        return False
    plain = not getattr(config, "attention_bias", False) and not getattr(config, "mlp_bias", False)
    return config.model_type == "llama" and plain and config.hidden_act == "silu" and width & (width - 1) == 0


@dataclass
class EngineState:
    """What a captured step reads and writes; every tensor keeps its address."""

    x: torch.Tensor  # image: input embedding of the next token, [R, H]
    lengths: torch.Tensor  # keys of each row, [R]
    prefix_rows: torch.Tensor  # the first keys of a row stand in this row, [R]
    prefix_lengths: torch.Tensor  # so many of them, [R]
    alive: torch.Tensor  # text: rows that go on, [B]
    going: torch.Tensor  # text: whether any row goes on, [1]
    counts: torch.Tensor  # text: sampled ids, [B]
    step: torch.Tensor  # column of uniforms, ids and logps, []
    uniforms: torch.Tensor  # [B, text steps + codes]
    ids: torch.Tensor  # [B, text steps + codes]
    logps: torch.Tensor  # [B, text steps + codes]
    hidden: torch.Tensor  # text: last hidden states, [B, H]


@dataclass
class EngineBuffers:
    """Weights, caches and state of a decode engine.

    Args:
        dtype: of weights and caches.

    Attributes:
        graphs: captured steps, which are void once a buffer or a weight has moved.
        rounded_layers: the sum of the first layers' outputs is rounded as transformers rounds it, later ones are kept
            in float32. At first engine and replay still see the same numbers, and equal roundings cancel; further on
            they would only add noise.
    """

    dtype: torch.dtype
    graphs: dict[tuple, torch.cuda.CUDAGraph] = field(default_factory=dict, kw_only=True)
    keys: torch.Tensor | None = field(default=None, kw_only=True)  # [layers, R, kv_heads, slots, D]
    values: torch.Tensor | None = field(default=None, kw_only=True)
    state: EngineState | None = field(default=None, kw_only=True)
    rounded_layers: ClassVar[int] = 2

    def __post_init__(self):
        self.weights = EngineWeights(self.dtype)

    def load_weights(self, model: JanusForInterleavedGeneration, with_text: bool = True) -> None:
        """Bring the weights up to date (see `EngineWeights.load`)."""
        self.config, self.vocab_size = model.config.text_config, model.vocab_size
        # An own instance: DeepSpeed's hooks on the model's would switch streams while a step is captured.
        self.activation = type(model.model.generation_head.activation_fn)()
        self.weights.load(model, with_text)
        if self.weights.moved:
            self.graphs.clear()

    def reserve(self, rows: int, streams: int, slots: int, steps: int) -> None:
        """Make room for `rows` rows in `streams` streams; buffers that are large enough stay, and graphs with them."""
        slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
        if self.keys is not None:
            held = len(self.state.alive)  # rows of a stream: the second stream begins behind them
            held_streams = self.keys.shape[1] // held
            fits = held >= rows and held_streams >= streams and self.keys.shape[3] >= slots
            if fits and self.state.uniforms.shape[1] >= steps:
                return
            slots, steps = max(slots, self.keys.shape[3]), max(steps, self.state.uniforms.shape[1])
            rows, streams = max(rows, held), max(streams, held_streams)
        self.release()
        config, device = self.config, self.weights["norm"].device
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows * streams, config.num_key_value_heads, slots, width)
        self.keys = torch.zeros(shape, dtype=self.dtype, device=device)
        self.values = torch.zeros(shape, dtype=self.dtype, device=device)

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.state = EngineState(
            x=buffer(rows * streams, config.hidden_size, dtype=self.dtype),
            lengths=buffer(rows * streams, dtype=torch.int64),
            prefix_rows=buffer(rows * streams, dtype=torch.int64),
            prefix_lengths=buffer(rows * streams, dtype=torch.int64),
            alive=buffer(rows, dtype=torch.bool),
            going=buffer(1, dtype=torch.bool),
            counts=buffer(rows, dtype=torch.int64),
            step=buffer(dtype=torch.int64),
            uniforms=buffer(rows, steps, dtype=torch.float32),
            ids=buffer(rows, steps, dtype=torch.int64),
            logps=buffer(rows, steps, dtype=torch.float32),
            hidden=buffer(rows, config.hidden_size, dtype=self.dtype),
        )
        self.cos, self.sin = self._rotary_tables(slots, device)

    def release(self, with_weights: bool = False) -> None:
        """Free caches and graphs (the next rollout captures again), and on request the copies of weights."""
        self.graphs.clear()
        self.keys = self.values = self.state = None
        if with_weights:
            self.weights.release()

    def _rotary_tables(self, slots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotary = LlamaRotaryEmbedding(self.config).to(device)
        positions = torch.arange(slots, device=device).unsqueeze(0)
        cos, sin = rotary(torch.zeros((), device=device), positions)  # [1, slots, D], float32
        return cos[0].contiguous(), sin[0].contiguous()

    def repeat_rows(self, count: int, times: int, uniforms: torch.Tensor) -> None:
        """After the text: each of the first `count` rows becomes `times` rows after one another, with its keys.

        Args:
            uniforms: `[count * times, steps]`, those of the rows that come out.
        """
        s, total = self.state, count * times
        used = int(s.lengths[:count].max())
        for row in range(total - 1, 0, -1):  # from behind: a row comes from one that stands before it
            for cache in (self.keys, self.values):
                cache[:, row, :, :used] = cache[:, row // times, :, :used]
        source = torch.arange(total, device=s.x.device) // times
        s.prefix_rows[:total] = s.prefix_rows[source] * times
        s.prefix_lengths[:total] = s.prefix_lengths[source]
        s.lengths[:total] = s.lengths[source]
        s.uniforms[:total, : uniforms.shape[1]] = uniforms.to(s.x.device)
