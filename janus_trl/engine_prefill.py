"""Prefill of the decode engine: whole prompts at once, each prompt of a group once."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .attention_kernels import fill_cache
from .engine_buffers import EngineBuffers
from .kernels import add_rms_norm, silu_mul, uses_triton

# Most hidden states that one pass of the prefill holds, in tokens.
PREFILL_TOKENS = 16384


@dataclass
class Prefill(EngineBuffers):
    """Fills the caches."""

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
        everyone = torch.arange(len(rows), device=rows.device)
        owners = torch.full((len(embeds),), len(rows), device=rows.device)
        owners = owners.scatter_reduce(0, rows, everyone, "amin") + first  # the first cache row of each prompt, [U]
        shares = uses_triton(self.weights["norm"])
        here = slice(first, first + len(rows))
        self.state.prefix_rows[here] = owners[rows] if shares else everyone + first
        self.state.prefix_lengths[here] = lengths[rows] if shares else 0
        per_pass = max(1, PREFILL_TOKENS // embeds.shape[1])
        last = []
        for start in range(0, len(embeds), per_pass):
            part = slice(start, start + per_pass)
            cache_rows, sources = owners[part], None
            if not shares:
                mine = ((rows >= start) & (rows < start + per_pass)).nonzero().squeeze(1)
                cache_rows, sources = mine + first, rows[mine] - start
            last.append(self._prefill_pass(embeds[part], lengths[part], cache_rows, sources))
        return torch.cat(last)

    def _prefill_pass(self, embeds, lengths, cache_rows, sources) -> torch.Tensor:
        w, config, eps = self.weights, self.config, self.config.rms_norm_eps
        batch, length, width = embeds.shape
        residual, delta = embeds.reshape(-1, width).to(torch.float32, copy=True), None
        for i in range(config.num_hidden_layers):
            hidden = add_rms_norm(residual, delta, w[f"{i}.norm1"], eps, i < self.rounded_layers)
            delta = self._attention(i, hidden.view(batch, length, width), cache_rows, sources)
            hidden = add_rms_norm(residual, delta, w[f"{i}.norm2"], eps, i < self.rounded_layers)
            delta = F.linear(silu_mul(F.linear(hidden, w[f"{i}.gate_up"])), w[f"{i}.down"])
        hidden = add_rms_norm(residual, delta, w["norm"], eps).view(batch, length, width)
        return hidden[torch.arange(batch, device=hidden.device), lengths - 1]

    def _attention(self, i: int, hidden: torch.Tensor, cache_rows, sources) -> torch.Tensor:
        """Of layer `i` for whole prompts `[U, P, H]`, whose keys go to the cache -> `[U * P, H]`."""
        (batch, length, _), config = hidden.shape, self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = F.linear(hidden, self.weights[f"{i}.qkv"]).view(batch, length, heads + 2 * kv_heads, -1)
        q, k, v = fill_cache(qkv, self.cos, self.sin, self.keys[i], self.values[i], cache_rows, sources)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return F.linear(mixed.transpose(1, 2).reshape(batch * length, -1), self.weights[f"{i}.o"])

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
