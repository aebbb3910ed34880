"""Decode engine: fixed weights and caches, one captured step for text and one for image codes.

What makes it fast: keys without padding (a row's slot is its position, see `attention_kernels`); q, k, v and gate, up
as one matrix each; guidance before the affine layer of the image head; sampling on the device; CUDA graphs that stay
valid for the whole run because every buffer keeps its place; `matrix_kernels` for steps of few rows. Without CUDA the
same steps run uncaptured. The residual stream, the image head's hidden states and all logits are float32 whatever the
dtype: it costs nothing, and less rounding is what guidance multiplies (but see `rounded_layers`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

from .attention_kernels import FAST_TILE, REPLAY_TILE, decode_attention
from .engine_prefill import Prefill
from .kernels import add_rms_norm, can_start_early, early_starts, embed, wide_linear
from .matrix_kernels import MOST_ROWS, gated_linear, linear, partial_linear
from .modeling import guide
from .sampling_kernels import advance_text, sample_step

# Text tokens between two looks at whether all rows have ended.
STOP_CHECK_EVERY = 8


@dataclass
class DecodeEngine(Prefill):
    """Samples chunks of rows with one set of buffers.

    Args:
        dtype: of weights and caches.
        use_cuda_graphs: capture the steps; off, they run one by one.

    Attributes:
        warmup_seconds: time spent on compiling and capturing so far.
    """

    use_cuda_graphs: bool = True
    warmup_seconds: float = 0.0
    stream: torch.cuda.Stream | None = None  # that steps are captured on

    # One step --------------------------------------------------------------------------------------------------------

    def _layers(self, residual: torch.Tensor, rows: int, tile: int = REPLAY_TILE, out=None) -> torch.Tensor:
        """Run one token of `rows` rows, whose keys go to slot `lengths`.

        Args:
            residual: the token's embedding, `[R, H]`, float32; overwritten.
            rows: R.
            tile: see `decode_attention`.
            out: `[R, H]`, to be written and returned.

        Returns:
            Last hidden states, `[R, H]`.
        """
        w, eps, state = self.weights, self.config.rms_norm_eps, self.state
        where = state.lengths[:rows], state.prefix_rows[:rows], state.prefix_lengths[:rows]
        how = self.config.num_attention_heads, tile
        delta = None
        for i in range(self.config.num_hidden_layers):
            hidden = add_rms_norm(residual, delta, w[f"{i}.norm1"], eps, i < self.rounded_layers)
            keys, values = self.keys[i, :rows], self.values[i, :rows]
            qkv = linear(hidden, w[f"{i}.qkv"])
            mixed = decode_attention(qkv, self.cos, self.sin, keys, values, *where, *how)
            delta = partial_linear(mixed, w[f"{i}.o"])
            hidden = add_rms_norm(residual, delta, w[f"{i}.norm2"], eps, i < self.rounded_layers)
            delta = partial_linear(gated_linear(hidden, w[f"{i}.gate_up"]), w[f"{i}.down"])
        return add_rms_norm(residual, delta, w["norm"], eps, out=out)

    def _text_step(self, rows: int, greedy: bool, temperature: float) -> None:
        s, w, record = self.state, self.weights, (self.state.ids[:rows], self.state.logps[:rows])
        logits = wide_linear(s.hidden[:rows], w["lm_head"])
        ids, logps = sample_step(logits, self.text_bias, s.uniforms[:rows], s.step, temperature, greedy)
        alive, counts = s.alive[:rows], s.counts[:rows]
        fed = advance_text(ids, logps, s.step, alive, counts, s.going, record, self.eos, self.opener, self.pad)
        self._layers(embed(ids, w["embed"]), rows, FAST_TILE, out=s.hidden[:rows])
        s.lengths[:rows] += fed  # a row that is not fed wrote into a slot that its next token takes

    def _image_step(self, rows: int, guidance: float, conditional: bool, greedy: bool, temperature: float) -> None:
        s, w, streams = self.state, self.weights, 2 if guidance != 1.0 else 1
        last = self._layers(s.x[: rows * streams].to(torch.float32, copy=True), rows * streams)
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
        try:
            graph = self._captured(step)
        finally:
            torch.backends.cuda.preferred_blas_library(library)
        for name, tensor in saved.items():
            getattr(self.state, name).copy_(tensor)
        torch.cuda.synchronize()
        self.warmup_seconds += time.perf_counter() - start
        return graph

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
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
        return graph

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
        s.going.fill_(True)
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
        late = int(self.state.alive.is_cuda)  # the answer is read one step later: the device need not wait for the host
        for step in tqdm(range(steps), desc="text", leave=False, disable=not progress):
            if step % STOP_CHECK_EVERY == 0:
                goes_on = self._goes_on()
            if step % STOP_CHECK_EVERY == late and not any_rank(goes_on()):
                break
            run()
        return self.state.counts

    def _goes_on(self) -> Callable[[], bool]:
        """Whether a row goes on: asked now, answered when the device gets there."""
        going = self.state.going
        if not going.is_cuda:
            return going.item
        answer, asked = torch.empty(1, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        answer.copy_(going, non_blocking=True)
        asked.record()

        def read() -> bool:
            asked.synchronize()
            return answer.item()

        return read

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
