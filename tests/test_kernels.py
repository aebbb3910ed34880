"""Kernels of the decode engine: Triton against PyTorch, on a GPU or in Triton's interpreter.

The suite is a CPU suite: set CUDA_VISIBLE_DEVICES=0 to run these on a GPU, or TRITON_INTERPRET=1.
"""

import pytest
import torch
from torch.nn import functional as F

from janus_trl import attention_kernels, kernels, matrix_kernels, sampling_kernels
from janus_trl.matrix_kernels import Tiling, tiling
from tests.triton_switch import needs_triton, use_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSORS = 132  # of an H200


@pytest.fixture
def with_triton(monkeypatch):
    """A switch between the two forms; that of PyTorch is there without Triton too."""

    def switch(on: bool) -> None:
        if on:
            needs_triton()
        use_triton(monkeypatch, on)

    return switch


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("width", [16, 2049, 102400])
@pytest.mark.parametrize("greedy", [True, False])
def test_sampling_gives_what_the_formulas_in_pytorch_give(width, greedy, with_triton):
    logits, bias = randn(6, width) * 3, torch.zeros(width, device=DEVICE)
    bias[: width // 4] = -1e30  # forbidden
    logits[3] += 20
    uniforms = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    step, found = torch.tensor(2, device=DEVICE), []
    for on in (True, False):
        with_triton(on)
        record = torch.zeros(6, 4, dtype=torch.int64, device=DEVICE), torch.zeros(6, 4, device=DEVICE)
        found.append((*sampling_kernels.sample_step(logits, bias, uniforms, step, 0.7, greedy, record), *record))
    (ids, logps, all_ids, all_logps), (expected, expected_logps, *_) = found
    assert torch.equal(ids, expected) and (ids >= width // 4).all()
    assert (logps - expected_logps).abs().max() < 1e-4
    assert torch.equal(all_ids[:, 2], ids) and torch.equal(all_logps[:, 2], logps)
    assert not all_ids[:, [0, 1, 3]].any() and not all_logps[:, [0, 1, 3]].any()
    with_triton(True)
    ids, logps = sampling_kernels.sample_step(logits * torch.nan, None, uniforms, step, 0.7, greedy)
    assert ((0 <= ids) & (ids < width)).all() and logps.isnan().all()  # refused later, by its log-probs


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(
    ("opener", "fed", "alive"),
    # rows: goes on, ends with eos, opens an image, ended before
    [(7, [True, True, False, False], [True, False, False, False]), (None, [1, 0, 1, 0], [1, 0, 1, 0])],
)
def test_a_text_step_notes_ids_and_ends_rows(opener, fed, alive, on, with_triton):
    with_triton(on)
    ids, logps = torch.tensor([4, 9, 7, 5], device=DEVICE), torch.tensor([-1.0, -2, -3, -4], device=DEVICE)
    going = torch.tensor([True, True, True, False], device=DEVICE)
    counts = torch.tensor([3, 3, 3, 1], device=DEVICE)
    record = torch.full((4, 3), 8, device=DEVICE), torch.full((4, 3), 0.5, device=DEVICE)
    eos = torch.tensor([6, 9], device=DEVICE)
    step, some = torch.tensor(1, device=DEVICE), torch.tensor([False], device=DEVICE)
    seen = sampling_kernels.advance_text(ids, logps, step, going, counts, some, record, eos, opener, pad=2)
    assert seen.tolist() == [bool(x) for x in fed] and going.tolist() == [bool(x) for x in alive]
    assert some.item() and step.item() == 2
    assert counts.tolist() == [4, 4, 4, 1]
    assert record[0].tolist() == [[8, 4, 8], [8, 9, 8], [8, 7, 8], [8, 2, 8]]
    assert record[1].tolist() == [[0.5, -1, 0.5], [0.5, -2, 0.5], [0.5, -3, 0.5], [0.5, 0, 0.5]]
    sampling_kernels.advance_text(ids * 0 + 9, logps, step, going, counts, some, record, eos, None, pad=2)
    assert not some.item() and not going.any() and step.item() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("summands", [0, 1, 4])
def test_norm_adds_summands_and_rounds_where_asked(summands, rounds, dtype, with_triton):
    residual, weight, found = randn(5, 48), randn(48, seed=1).to(dtype), []
    delta = {0: None, 1: randn(5, 48, seed=2).to(dtype)}.get(summands, randn(summands, 5, 48, seed=2))
    for on in (True, False):
        with_triton(on)
        total = residual.clone()
        found.append((kernels.add_rms_norm(total, delta, weight, 1e-6, rounds), total))
    (ours, ours_total), (plain, plain_total) = found
    close = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(ours, plain, **close)
    torch.testing.assert_close(ours_total, plain_total, **close)
    assert summands or torch.equal(ours_total, residual)
    for on in (True, False):
        with_triton(on)
        out = torch.empty_like(ours)
        assert kernels.add_rms_norm(residual.clone(), delta, weight, 1e-6, rounds, out=out) is out
        assert torch.equal(out, ours if on else plain)


@pytest.mark.parametrize("on", [True, False])
def test_embeddings_are_the_rows_of_the_table_in_float32(on, with_triton):
    with_triton(on)
    table, ids = randn(9, 20).bfloat16(), torch.tensor([3, 0, 8, 3], device=DEVICE)
    rows = kernels.embed(ids, table)
    assert rows.dtype == torch.float32 and torch.equal(rows, table[ids].float())
    rows.zero_()
    assert table[ids].any()  # they are a copy


def test_residual_is_rounded_to_the_type_of_the_weight_only_where_asked():
    residual, delta, weight = randn(3, 16), randn(3, 16, seed=1).bfloat16(), torch.ones(16, device=DEVICE).bfloat16()
    exact, rounded = residual.clone(), residual.clone()
    kernels.add_rms_norm(exact, delta, weight, 1e-6)
    kernels.add_rms_norm(rounded, delta, weight, 1e-6, rounds=True)
    assert torch.equal(exact, residual + delta) and not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(rounded, exact.bfloat16().float())
    first = residual.clone()
    kernels.add_rms_norm(first, None, weight, 1e-6, rounds=True)
    assert torch.equal(first, residual)  # there is no sum yet


@pytest.mark.parametrize("rows", [5, 16, 33])
@pytest.mark.parametrize("splits", [1, 2])
def test_split_products_add_up(rows, splits, with_triton):
    with_triton(True)
    x, weight = randn(rows, 256), randn(64, 256, seed=1) * 0.1
    parts = matrix_kernels.run(x, weight, Tiling(32, 64, splits, 2), dtype=torch.float32)
    assert parts.shape == (splits, rows, 64)
    tolerance = 5e-3 if DEVICE == "cuda" else 1e-5  # the matrix units of a GPU take TF32
    assert (parts.sum(0) - x @ weight.t()).abs().max() < tolerance
    if splits == 2:
        assert (parts[0] - x[:, :128] @ weight[:, :128].t()).abs().max() < tolerance


def test_gated_product_is_silu_of_the_gate_times_up(with_triton):
    with_triton(True)
    x, weight = randn(7, 128), randn(2 * 32, 128, seed=1) * 0.1
    ours = matrix_kernels.run(x, weight, Tiling(16, 64, 1, 2), gated=True)[0]
    gate, up = (x @ weight.t()).chunk(2, -1)
    assert (ours - F.silu(gate) * up).abs().max() < (3e-2 if DEVICE == "cuda" else 1e-5)  # a product of two with TF32


@pytest.mark.parametrize(("hidden", "inner"), [(2048, 5632), (4096, 11008)])  # Janus-Pro-1B and 7B
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_tilings_cover_the_products_and_fit_the_processor(hidden, inner, rows):
    shapes = [(3 * hidden, hidden, False, False), (hidden, hidden, False, True)]
    shapes += [(inner, hidden, True, False), (hidden, inner, False, True)]
    for columns, depth, gated, may_split in shapes:
        tiles = tiling(rows, columns, depth, PROCESSORS, gated, may_split)
        assert columns % tiles.columns == 0 and depth % (tiles.splits * tiles.depth) == 0
        held = ((2 if gated else 1) * tiles.columns + max(16, rows)) * tiles.depth * 2 * tiles.stages
        programs = columns // tiles.columns * tiles.splits
        assert held <= (165_000 if programs <= PROCESSORS else 100_000)
        assert tiles.splits == 1 or programs <= PROCESSORS  # splitting fills processors, no more
        assert tiles.splits == 1 or may_split


def test_products_that_do_not_fit_are_left_to_cublas():
    assert tiling(65, 2048, 2048, PROCESSORS, False, False) is None
    assert tiling(8, 2048 + 32, 2048, PROCESSORS, False, False) is None
    assert tiling(8, 2048, 2048 + 32, PROCESSORS, False, False) is None


def test_kernels_start_early_only_where_asked_and_products_are_plain_elsewhere():
    assert kernels.launch_options() == {"PDL": False}
    with pytest.raises(RuntimeError), kernels.early_starts(True):
        assert kernels.launch_options() == {"PDL": True, "launch_pdl": True}
        raise RuntimeError
    assert not kernels.starts_early()  # also after an error
    x, weight = randn(4, 64).bfloat16(), randn(128, 64).bfloat16()
    assert torch.equal(matrix_kernels.linear(x, weight), F.linear(x, weight))
    assert torch.equal(matrix_kernels.partial_linear(x, weight), F.linear(x, weight))
    assert torch.equal(matrix_kernels.gated_linear(x, weight), kernels.silu_mul(F.linear(x, weight)))


def test_rotation_rounds_where_transformers_rounds():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = randn(1, 6, 16)
    angles = torch.cat([angles, angles], -1)
    q = randn(1, 3, 6, 32, seed=1).bfloat16()
    cos, sin = angles.cos(), angles.sin()
    expected, _ = apply_rotary_pos_emb(q, q, cos.bfloat16(), sin.bfloat16())
    assert torch.equal(attention_kernels.rotate(q, cos, sin), expected)
    assert not torch.equal((q.float() * cos + torch.cat([-q[..., 16:], q[..., :16]], -1) * sin).bfloat16(), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (20, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill_puts_rotated_keys_and_values_into_the_rows_of_their_prompts(heads, kv_heads, dtype, with_triton):
    prompts, length, width, slots, rows = 2, 5, 16, 8, 4
    qkv = randn(prompts, length, heads + 2 * kv_heads, width).to(dtype)
    angles = randn(slots, width // 2, seed=1).repeat(1, 2)
    owners, found = torch.tensor([1, 3], device=DEVICE), []
    for on in (True, False):
        with_triton(on)
        keys, values = (torch.full((rows, kv_heads, slots, width), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
        parts = attention_kernels.fill_cache(qkv, angles.cos(), angles.sin(), keys, values, owners)
        found.append((*parts, keys, values))
    (q, k, v, keys, values), expected = found
    for ours, plain in zip(found[0], expected, strict=True):
        assert torch.equal(ours, plain) if dtype == torch.float16 else torch.allclose(ours, plain, atol=1e-6)
    assert q.shape == (prompts, heads, length, width) and k.shape == v.shape == (prompts, kv_heads, length, width)
    assert torch.equal(keys[owners, :, :length], k) and torch.equal(values[owners, :, :length], v)
    assert torch.equal(v, qkv[:, :, -kv_heads:].transpose(1, 2))
    for cache in (keys, values):
        assert (cache[[0, 2]] == 7).all() and (cache[:, :, length:] == 7).all()


@pytest.mark.parametrize("tile", [attention_kernels.REPLAY_TILE, attention_kernels.FAST_TILE])
def test_attention_gives_what_pytorch_gives_whatever_the_tile(tile, with_triton):
    rows, heads, kv_heads, slots, width = 5, 4, 2, 256, 16
    lengths = torch.tensor([0, 1, 64, 128, 200], device=DEVICE)
    qkv, angles = randn(rows, (heads + 2 * kv_heads) * width), randn(slots, width // 2, seed=1).repeat(1, 2)
    own, none, found = torch.arange(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE), []
    for on in (True, False):
        with_triton(on)
        keys, values = randn(rows, kv_heads, slots, width, seed=2), randn(rows, kv_heads, slots, width, seed=3)
        where = keys, values, lengths, own, none
        found.append(attention_kernels.decode_attention(qkv, angles.cos(), angles.sin(), *where, heads, tile))
    assert (found[0] - found[1]).abs().max() < 5e-5


@pytest.mark.parametrize("tile", [attention_kernels.REPLAY_TILE, attention_kernels.FAST_TILE])
def test_rows_of_a_group_read_the_keys_of_their_prompt_in_one_row(tile, with_triton):
    heads, slots, width, owner = 2, 256, 16, 1
    lengths, shared = torch.tensor([70, 130, 200], device=DEVICE), torch.tensor([70, 66, 129], device=DEVICE)
    qkv, angles = randn(3, 3 * heads * width), randn(slots, width // 2, seed=1).repeat(1, 2)
    caches = [randn(3, heads, slots, width, seed=seed) for seed in (2, 3)]
    alone = [cache.clone() for cache in caches]  # of which each row holds its own, as PyTorch reads them
    for cache, own in zip(caches, alone, strict=True):
        for row, length in enumerate(shared.tolist()):
            own[row, :, :length] = own[owner, :, :length]
            if row != owner:
                cache[row, :, :length] = torch.nan
    rows, owners = torch.arange(3, device=DEVICE), torch.full_like(lengths, owner)
    with_triton(False)
    args = qkv, angles.cos(), angles.sin()
    expected = attention_kernels.decode_attention(*args, *alone, lengths, rows, shared * 0, heads, tile)
    with_triton(True)
    ours = attention_kernels.decode_attention(*args, *caches, lengths, owners, shared, heads, tile)
    assert (ours - expected).abs().max() < 5e-5
