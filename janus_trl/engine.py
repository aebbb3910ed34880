"""Decode engine: fixed weights and caches, one captured step for text and one for image codes.

What makes it fast: keys without padding (a row's slot is its position, see `kernels`), q, k, v and gate, up as one
matrix each, guidance before the affine layer of the image head, sampling on the device, and CUDA graphs that stay
valid for the whole run because every buffer keeps its place; steps of few rows run on `matrix_kernels`. Without CUDA
the same steps run uncaptured. The residual stream, the image head's hidden states and all logits are float32 whatever
the dtype: it costs nothing, and less rounding is what guidance multiplies (but see `ROUNDED_LAYERS`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

from .engine_weights import EngineWeights
from .kernels import (
    add_rms_norm,
    can_start_early,
    decode_attention,
    early_starts,
    rotate,
    silu_mul,
    uses_triton,
    wide_linear,
)
from .matrix_kernels import MOST_ROWS, gated_linear, linear, partial_linear
from .modeling import JanusForInterleavedGeneration, guide
from .sampling_kernels import advance_text, sample_step

# Slots of the caches come in multiples of this, so that prompts of other lengths find room in the same buffers.
SLOT_MULTIPLE = 128
# Text tokens between two looks at whether all rows have ended: each look waits for the device.
STOP_CHECK_EVERY = 8
# Most hidden states that one pass of the prefill holds, in tokens.
PREFILL_TOKENS = 16384
# The sum of the first layers' outputs is rounded as transformers rounds it, later ones are kept in float32. At first
# engine and replay still see the same numbers, and equal roundings cancel; further on they would only add noise.
ROUNDED_LAYERS = 2


def supports(model: JanusForInterleavedGeneration) -> bool:
    """Whether the language model is a plain Llama (no biases, head size a power of two, 16 or more on a GPU)."""
    config = model.config.text_config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if model.lm_head.weight.device.type == "cuda" and width < 16:  # the least that the matrix units take
        return False
    plain = not getattr(config, "attention_bias", False) and not getattr(config, "mlp_bias", False)
    return config.model_type == "llama" and plain and config.hidden_act == "silu" and width & (width - 1) == 0


@dataclass
class _State:
    """What a captured step reads and writes; every tensor keeps its address."""

    x: torch.Tensor  # input embedding of the next token, [R, H]
    lengths: torch.Tensor  # keys of each row, [R]
    prefix_rows: torch.Tensor  # the first keys of a row stand in this row, [R]
    prefix_lengths: torch.Tensor  # so many of them, [R]
    alive: torch.Tensor  # text: rows that go on, [B]
    counts: torch.Tensor  # text: sampled ids, [B]
    step: torch.Tensor  # column of the uniforms, []
    uniforms: torch.Tensor  # [B, text steps + codes]
    ids: torch.Tensor  # [B, text steps + codes]
    logps: torch.Tensor  # [B, text steps + codes]
    hidden: torch.Tensor  # text: last hidden states, [B, H]


@dataclass
class DecodeEngine:
    """Samples chunks of rows with one set of buffers.

    Args:
        dtype: of weights and caches.
        use_cuda_graphs: capture the steps; off, they run one by one.

    Attributes:
        warmup_seconds: time spent on compiling and capturing so far.
    """

    dtype: torch.dtype
    use_cuda_graphs: bool = True
    graphs: dict[tuple, torch.cuda.CUDAGraph] = field(default_factory=dict)
    keys: torch.Tensor | None = None  # [layers, R, kv_heads, slots, D]
    values: torch.Tensor | None = None
    state: _State | None = None
    warmup_seconds: float = 0.0
    stream: torch.cuda.Stream | None = None  # that steps are captured on

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

    # Buffers ---------------------------------------------------------------------------------------------------------

    def reserve(self, rows: int, streams: int, slots: int, steps: int) -> None:
        """Make room for `rows` rows in `streams` streams; buffers that are large enough stay, and graphs with them."""
        slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
        if self.keys is not None:
            fits = self.keys.shape[1] >= rows * streams and self.keys.shape[3] >= slots
            if fits and len(self.state.alive) >= rows and self.state.uniforms.shape[1] >= steps:
                return
            slots, steps = max(slots, self.keys.shape[3]), max(steps, self.state.uniforms.shape[1])
            rows, streams = max(rows, len(self.state.alive)), max(streams, self.keys.shape[1] // len(self.state.alive))
        self.release()
        config, device = self.config, self.weights["norm"].device
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows * streams, config.num_key_value_heads, slots, width)
        self.keys = torch.zeros(shape, dtype=self.dtype, device=device)
        self.values = torch.zeros(shape, dtype=self.dtype, device=device)

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.state = _State(
            x=buffer(rows * streams, config.hidden_size, dtype=self.dtype),
            lengths=buffer(rows * streams, dtype=torch.int64),
            prefix_rows=buffer(rows * streams, dtype=torch.int64),
            prefix_lengths=buffer(rows * streams, dtype=torch.int64),
            alive=buffer(rows, dtype=torch.bool),
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

    # One step --------------------------------------------------------------------------------------------------------

    def _layers(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Run one token of `rows` rows, `[R, H]` -> last hidden states `[R, H]`; keys go to slot `lengths`."""
        w, eps, state = self.weights, self.config.rms_norm_eps, self.state
        where = state.lengths[:rows], state.prefix_rows[:rows], state.prefix_lengths[:rows]
        residual, delta = x.to(torch.float32, copy=True), None
        for i in range(self.config.num_hidden_layers):
            hidden = add_rms_norm(residual, delta, w[f"{i}.norm1"], eps, i < ROUNDED_LAYERS)
            keys, values = self.keys[i, :rows], self.values[i, :rows]
            qkv = linear(hidden, w[f"{i}.qkv"])
            mixed = decode_attention(qkv, self.cos, self.sin, keys, values, *where, self.config.num_attention_heads)
            hidden = add_rms_norm(
                residual, partial_linear(mixed, w[f"{i}.o"]), w[f"{i}.norm2"], eps, i < ROUNDED_LAYERS
            )
            delta = partial_linear(gated_linear(hidden, w[f"{i}.gate_up"]), w[f"{i}.down"])
        return add_rms_norm(residual, delta, w["norm"], eps)

    def _text_step(self, rows: int, greedy: bool, temperature: float) -> None:
        s, w, record = self.state, self.weights, (self.state.ids[:rows], self.state.logps[:rows])
        logits = wide_linear(s.hidden[:rows], w["lm_head"])
        ids, logps = sample_step(logits, self.text_bias, s.uniforms[:rows], s.step, temperature, greedy)
        alive, counts = s.alive[:rows], s.counts[:rows]
        fed = advance_text(ids, logps, s.step, alive, counts, record, self.eos, self.opener, self.pad)
        s.step += 1
        s.hidden[:rows] = self._layers(F.embedding(ids, w["embed"]), rows)
        s.lengths[:rows] += fed  # a row that is not fed wrote into a slot that its next token takes

    def _image_step(self, rows: int, guidance: float, conditional: bool, greedy: bool, temperature: float) -> None:
        s, w, streams = self.state, self.weights, 2 if guidance != 1.0 else 1
        last = self._layers(s.x[: rows * streams], rows * streams)
        s.lengths[: rows * streams] += 1
        hidden = self.activation(wide_linear(last, w["proj_out"]) + w["proj_out.bias"])  # float32
        own, mixed = hidden[:rows], hidden
        if streams == 2:
            mixed = guide(own, hidden[rows:], guidance)
        logits, bias = wide_linear(mixed.to(self.dtype), w["vision_head"]), w["vision_head.bias"]
        record = s.ids[:rows], s.logps[:rows]
        ids, _ = sample_step(logits, bias, s.uniforms[:rows], s.step, temperature, greedy, record)
        if streams == 2 and conditional:
            plain = wide_linear(own.to(self.dtype), w["vision_head"]) + bias
            plain = (plain / temperature).log_softmax(-1).gather(-1, ids.unsqueeze(-1))
            s.logps[:rows].index_copy_(1, s.step.view(1), plain)
        s.step += 1
        s.x[: rows * streams] = F.embedding(ids, w["codes"]).repeat(streams, 1)

    def _runner(self, key: tuple, rows: int, step: Callable[[], None]) -> Callable[[], None]:
        """`step` of `rows` rows as a captured graph, or itself without CUDA graphs. The state stays as it was."""
        if not (self.use_cuda_graphs and self.weights["norm"].device.type == "cuda"):
            return step
        if key not in self.graphs:
            early = rows <= MOST_ROWS and can_start_early(self.weights["norm"])
            with early_starts(early):
                self.graphs[key] = self._capture(step)
        return self.graphs[key].replay

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        start, saved = time.perf_counter(), {name: tensor.clone() for name, tensor in vars(self.state).items()}
        library = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")  # up to 12 % faster than cuBLAS at 64 rows
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()  # compiles the kernels and lets cuBLAS choose
        torch.cuda.current_stream().wait_stream(self.stream)
        # cuBLAS keeps a workspace of 33 MiB for every stream that it has seen. Dropped before and after, as inductor
        # does, the one that the graph writes to lies in the graph's own memory and goes with it.
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            step()
        torch._C._cuda_clearCublasWorkspaces()
        torch.backends.cuda.preferred_blas_library(library)
        for name, tensor in saved.items():
            getattr(self.state, name).copy_(tensor)
        torch.cuda.synchronize()
        self.warmup_seconds += time.perf_counter() - start
        return graph

    # Prefill ---------------------------------------------------------------------------------------------------------

    def prefill(self, embeds: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
        """Fill caches from embeddings that start at slot 0 and are padded behind.

        Causal attention needs no mask then: what stands behind a row's length is overwritten before it is read. On
        CUDA the rows with one prompt share one copy of its keys, that of the first such row.

        Args:
            embeds: `[U, P, H]`, one row per different prompt.
            lengths: `[U]`.
            rows: `[R]`, which of the U each cache row gets.
            first: the cache row that `rows` begins at.

        Returns:
            Hidden states of the last token of each different prompt, `[U, H]`.
        """
        owners = [(rows == i).nonzero()[0, 0] for i in range(len(embeds))]
        owners = torch.stack(owners) + first  # the first cache row of each prompt, [U]
        shares = uses_triton(self.weights["norm"])
        here = slice(first, first + len(rows))
        self.state.prefix_rows[here] = owners[rows] if shares else torch.arange(first, here.stop, device=rows.device)
        self.state.prefix_lengths[here] = lengths[rows] if shares else 0
        per_pass = max(1, PREFILL_TOKENS // embeds.shape[1])
        last = []
        for start in range(0, len(embeds), per_pass):
            part = slice(start, start + per_pass)
            mine = ((rows >= start) & (rows < start + per_pass)).nonzero().squeeze(1)
            cache_rows, sources = (owners[part], None) if shares else (mine + first, rows[mine] - start)
            last.append(self._prefill_pass(embeds[part], lengths[part], cache_rows, sources))
        return torch.cat(last)

    def _prefill_pass(self, embeds, lengths, cache_rows, sources) -> torch.Tensor:
        w, config, eps = self.weights, self.config, self.config.rms_norm_eps
        batch, length, width = embeds.shape
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        residual, delta = embeds.reshape(-1, width).to(torch.float32, copy=True), None
        cos, sin = (table[:length].unsqueeze(1).to(self.dtype) for table in (self.cos, self.sin))  # [P, 1, D]
        for i in range(config.num_hidden_layers):
            hidden = add_rms_norm(residual, delta, w[f"{i}.norm1"], eps, i < ROUNDED_LAYERS)
            qkv = F.linear(hidden, w[f"{i}.qkv"]).view(batch, length, heads + 2 * kv_heads, -1)
            rotated = rotate(qkv[:, :, : heads + kv_heads], cos, sin)
            parts = (rotated[:, :, :heads], rotated[:, :, heads:], qkv[:, :, heads + kv_heads :])
            q, k, v = (part.transpose(1, 2) for part in parts)  # [U, heads, P, D]
            self.keys[i, cache_rows, :, :length] = k if sources is None else k[sources]
            self.values[i, cache_rows, :, :length] = v if sources is None else v[sources]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            mixed = mixed.transpose(1, 2).reshape(batch * length, -1)
            hidden = add_rms_norm(residual, F.linear(mixed, w[f"{i}.o"]), w[f"{i}.norm2"], eps, i < ROUNDED_LAYERS)
            delta = F.linear(silu_mul(F.linear(hidden, w[f"{i}.gate_up"])), w[f"{i}.down"])
        hidden = add_rms_norm(residual, delta, w["norm"], eps).view(batch, length, width)
        return hidden[torch.arange(batch, device=hidden.device), lengths - 1]

    # Stages ----------------------------------------------------------------------------------------------------------

    def start(self, embeds, lengths, rows, uniforms, special, forbidden: list[int], opener: int | None) -> None:
        """Begin a chunk: prefill the prompts into cache rows 0 … B-1.

        Args:
            embeds, lengths, rows: see `prefill`.
            uniforms: `[B, steps]`.
            special: `SpecialIds`.
            forbidden: ids that are no text.
            opener: `<begin_of_image>` where a text may open an image, else None.
        """
        s, device = self.state, self.state.x.device
        if not hasattr(self, "text_bias"):
            self.text_bias = torch.zeros(self.vocab_size, device=device)
            self.eos = torch.tensor(special.eos, device=device)
        self.pad, self.opener, count = special.pad, opener, len(rows)
        self.text_bias.zero_()
        self.text_bias[forbidden] = -1e30
        s.uniforms[:count, : uniforms.shape[1]] = uniforms.to(device)
        s.prefix_lengths.zero_()
        s.hidden[:count] = self.prefill(embeds, lengths, rows, first=0)[rows]
        s.lengths.zero_()
        s.lengths[:count] = lengths[rows]
        s.alive.zero_()
        s.alive[:count] = True
        s.counts.zero_()
        s.step.zero_()

    def text(self, steps: int, greedy: bool, temperature: float, any_rank, progress: bool) -> torch.Tensor:
        """Sample text until all rows ended or `steps` ids; returns counts `[B]`. Ids stand in `state.ids`."""
        if steps == 0:
            return self.state.counts
        rows = len(self.state.alive)
        run = self._runner(
            ("text", greedy, temperature, self.opener), rows, lambda: self._text_step(rows, greedy, temperature)
        )
        for step in tqdm(range(steps), desc="text", leave=False, disable=not progress):
            if step % STOP_CHECK_EVERY == 0 and not any_rank(bool(self.state.alive.any())):
                break
            run()
        return self.state.counts

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

    def image(self, first: torch.Tensor, column: int, codes: int, settings, progress: bool) -> None:
        """Sample `codes` codes into the columns from `column` on; `first` `[H]` embeds `<begin_of_image>`."""
        s, rows = self.state, len(self.state.alive)
        s.x[:] = first.to(self.dtype)
        s.step.fill_(column)
        guidance, conditional = settings.guidance_scale, settings.logp_guidance == "conditional"
        greedy, temperature = settings.greedy, settings.image_temperature
        run = self._runner(
            ("image", guidance, conditional, greedy, temperature),
            rows * (2 if guidance != 1.0 else 1),
            lambda: self._image_step(rows, guidance, conditional, greedy, temperature),
        )
        for step in tqdm(range(codes), desc="image codes", leave=False, disable=not progress):
            run()
            if progress and step % 32 == 31 and s.x.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # else the bar shows launches

    def unconditional(self, embeds: torch.Tensor, rows: torch.Tensor) -> None:
        """Prefill the unconditional stream into cache rows B … 2B-1; lengths are those of the conditional rows.

        Attention is causal, so a row that is a prefix of another one can take that one's keys.

        Args:
            embeds: `[U, P, H]`: one row that all others are prefixes of, or one per row of the chunk.
            rows: `[R]`, which of the U each row gets; a shared row is kept by the longest row, which writes behind it.
        """
        s, first = self.state, len(self.state.alive)
        s.lengths[first : 2 * first] = s.lengths[:first]
        whole = torch.full((len(embeds),), embeds.shape[1], device=s.x.device)
        if len(embeds) == 1:
            self._unconditional_from_longest(embeds, whole, len(rows), first)
        else:
            self.prefill(embeds, whole, rows, first)

    def _unconditional_from_longest(self, embeds, length, count: int, first: int) -> None:
        s, shares = self.state, uses_triton(self.weights["norm"])
        everyone = torch.arange(first, first + count, device=s.x.device)
        longest = s.lengths[:count].argmax() + first
        sources = None if shares else torch.zeros(count, dtype=torch.int64, device=s.x.device)
        self._prefill_pass(embeds, length, longest.unsqueeze(0) if shares else everyone, sources)
        s.prefix_rows[everyone] = longest if shares else everyone
        s.prefix_lengths[everyone] = s.lengths[:count] if shares else 0
