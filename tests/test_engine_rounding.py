"""Where the decode engine rounds in bfloat16: as the replay (transformers' Llama) while both see the same numbers."""

import pytest
import torch
from transformers import DynamicCache

from janus_trl import kernels
from janus_trl.attention_kernels import decode_attention
from janus_trl.engine import DecodeEngine
from janus_trl.modeling import JanusForInterleavedGeneration
from tests.triton_switch import needs_triton, use_triton

ROWS, LENGTH, WIDTH = 3, 41, 64


@pytest.fixture
def half_model(janus_folder):  # `model.to` would round the frequencies of the rotation too
    return JanusForInterleavedGeneration.from_pretrained(janus_folder, dtype=torch.bfloat16).eval()


def keys_of_transformers(model, embeds: torch.Tensor) -> list[torch.Tensor]:
    cache = DynamicCache()
    mask = torch.ones(embeds.shape[:2], dtype=torch.long)
    with torch.no_grad():
        model.model.language_model(inputs_embeds=embeds, attention_mask=mask, cache=cache, use_cache=True)
    return [layer.keys for layer in cache.layers]


def keys_of_engine(model, embeds: torch.Tensor) -> torch.Tensor:
    """The prompt but its last token as prefill, the last token as a decode step."""
    engine = DecodeEngine(torch.bfloat16, use_cuda_graphs=False)
    engine.load_weights(model)
    rows, length = len(embeds), embeds.shape[1] - 1
    engine.reserve(rows, 1, embeds.shape[1], 1)
    with torch.no_grad():
        engine.prefill(embeds[:, :-1], torch.full((rows,), length), torch.arange(rows), first=0)
        engine.state.lengths[:rows] = length
        engine._layers(embeds[:, -1].float(), rows)
    return engine.keys[:, :, :, : length + 1]


def test_keys_of_the_first_layers_are_those_of_transformers(half_model, monkeypatch):
    """A few may differ by one rounding: products of other shapes may sum in another order."""
    width, generator = half_model.config.text_config.hidden_size, torch.Generator().manual_seed(1)
    embeds = torch.randn(ROWS, LENGTH, width, generator=generator).bfloat16()
    expected = keys_of_transformers(half_model, embeds)

    def equal() -> list[float]:
        keys = keys_of_engine(half_model, embeds)
        assert len(keys) == len(expected) == 2
        return [(ours == theirs).float().mean().item() for ours, theirs in zip(keys, expected, strict=True)]

    assert min(equal()) > 0.99
    monkeypatch.setattr(DecodeEngine, "rounded_layers", 0)
    first, second = equal()
    assert first > 0.99 and second < 0.95


@pytest.mark.parametrize("rounds", [False, True])
def test_kernels_of_norm_and_rotation_round_as_the_formulas_in_pytorch(rounds, monkeypatch):
    needs_triton()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(3)
    residual, delta = (torch.randn(ROWS, WIDTH, generator=generator).to(device) for _ in range(2))
    weight = torch.rand(WIDTH, generator=generator).half().to(device)
    angles = torch.randn(8, WIDTH // 2, generator=generator).repeat(1, 2).to(device)
    qkv = torch.randn(ROWS, 3 * WIDTH, generator=generator).half().to(device)
    lengths, zeros = torch.arange(ROWS, device=device), torch.zeros(ROWS, dtype=torch.int64, device=device)
    found = []
    for uses in (True, False):
        use_triton(monkeypatch, uses)
        stream, keys = residual.clone(), torch.zeros(ROWS, 1, 8, WIDTH, dtype=torch.float16, device=device)
        out = kernels.add_rms_norm(stream, delta.half(), weight, 1e-6, rounds)
        decode_attention(
            qkv, angles.cos(), angles.sin(), keys, keys.clone(), lengths, torch.arange(ROWS, device=device), zeros, 1
        )
        found.append((stream, keys, out))
    (stream, keys, out), expected = found
    assert torch.equal(stream, expected[0]) and torch.equal(keys, expected[1])
    assert (out == expected[2]).float().mean() > 0.98  # the mean of squares may sum in another order


def tiled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descending: bool = False) -> torch.Tensor:
    """One query `[D]` over `[N, D]` in tiles of 128 keys, from the first to the last; p is rounded."""
    scores = k.float() @ q.float() * q.shape[-1] ** -0.5
    top, total, mixed = torch.tensor(-torch.inf), 0.0, torch.zeros_like(q, dtype=torch.float32)
    starts = range(0, len(k), 128)
    for start in reversed(starts) if descending else starts:
        part = slice(start, start + 128)
        new_top = torch.maximum(top, scores[part].max())
        p, shrink = (scores[part] - new_top).exp(), (top - new_top).exp()
        total, mixed, top = total * shrink + p.sum(), mixed * shrink + p.to(v.dtype).float() @ v[part].float(), new_top
    return (mixed / total).to(v.dtype)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300])
def test_attention_kernel_rounds_as_the_attention_of_the_replay(length, monkeypatch):
    """On a GPU, or in Triton's interpreter (TRITON_INTERPRET=1), which has no products in bfloat16."""
    needs_triton()
    use_triton(monkeypatch, True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(length)
    heads, width, slots = 16, 64, 384
    keys, values = (torch.randn(1, heads, slots, width, generator=generator).half().to(device) for _ in range(2))
    qkv = (2 * torch.randn(1, 3 * heads * width, generator=generator)).half().to(device)
    q, k_new, v_new = qkv.view(3, heads, width)
    cos, sin = torch.ones(slots, width, device=device), torch.zeros(slots, width, device=device)
    place = torch.tensor([length], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    out = decode_attention(qkv, cos, sin, keys, values, *place, place[1], heads).view(heads, width).cpu()
    assert torch.equal(keys[0, :, length], k_new) and torch.equal(values[0, :, length], v_new)
    used = keys[0, :, : length + 1].cpu(), values[0, :, : length + 1].cpu()
    rows = list(zip(q.cpu(), *used, strict=True))
    assert (out == torch.stack([tiled_attention(*row) for row in rows])).float().mean() > 0.98
    if length > 128:
        assert (out == torch.stack([tiled_attention(*row, descending=True) for row in rows])).float().mean() < 0.97


def test_attention_kernel_is_nearly_bit_equal_to_that_of_the_replay_on_a_gpu():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention is PyTorch's choice on Hopper")
    torch.manual_seed(0)
    heads, width, length = 16, 128, 500
    q, k, v = (torch.randn(2, heads, length + 1, width, device="cuda").bfloat16() for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, -1]
    keys, values = k.clone(), v.clone()
    keys[:, :, length], values[:, :, length] = 0, 0
    qkv = torch.cat([q[:, :, -1], k[:, :, -1], v[:, :, -1]], 1).flatten(1)
    cos, sin = torch.ones(length + 1, width, device="cuda"), torch.zeros(length + 1, width, device="cuda")
    zeros = torch.zeros(2, dtype=torch.int64, device="cuda")
    out = decode_attention(qkv, cos, sin, keys, values, zeros + length, zeros, zeros, heads)
    assert (out.view(2, heads, width) == expected).float().mean() > 0.99
