"""The image tokenizer of the tiny model: its training parts, on a few steps and a small size."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import JanusVQVAEConfig

from janus_trl.tiny.vq import Codebook, round_trip, round_trip_accuracy, to_pictures, to_pixels, train_vq
from janus_trl.tiny.world import render_batch, sample_scene


@pytest.fixture(scope="module")
def config() -> JanusVQVAEConfig:
    sizes = {"base_channels": 32, "channel_multiplier": [1, 1, 1], "latent_channels": 32, "num_res_blocks": 1}
    return JanusVQVAEConfig(embed_dim=8, num_embeddings=16, num_patches=8, **sizes)


@pytest.fixture(scope="module")
def trained(config):
    return train_vq(config, steps=12, batch_size=4, warmup_steps=4)


def test_pixels_and_pictures_are_inverse():
    pictures = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    pixels = to_pixels(pictures)
    assert pixels.shape == (3, 3, 32, 32) and pixels.min() >= -1 and pixels.max() <= 1
    assert np.array_equal(np.stack([np.asarray(picture) for picture in to_pictures(pixels)]), pictures)


def test_trained_codebook_has_unit_norm_so_encode_and_decode_agree(trained):
    norms = trained.quantize.embedding.weight.norm(dim=-1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-5)
    rng = np.random.default_rng(0)
    pixels = to_pixels(render_batch([sample_scene(rng) for _ in range(4)], rng))
    with torch.no_grad():
        encoded = trained.encode(pixels)
        latents = trained.quantize.get_codebook_entry(encoded.image_tokens.view(4, -1))
    assert torch.allclose(latents, encoded.quantized_last_hidden_state, atol=1e-5)


def test_training_lowers_the_error_and_repeats_for_a_seed(config, trained):
    rng = np.random.default_rng(5)
    pictures = render_batch([sample_scene(rng) for _ in range(16)], rng)

    def error(model) -> float:
        return np.mean([np.square(np.float32(a) - b) for a, b in zip(round_trip(model, pictures), pictures)])

    untrained = type(trained)(config).eval()
    untrained.quantize.embedding.weight.data = F.normalize(untrained.quantize.embedding.weight.data, dim=-1)
    assert error(trained) < 0.5 * error(untrained)
    assert not trained.training and all(weight.requires_grad for weight in trained.parameters())
    again = train_vq(config, steps=12, batch_size=4, warmup_steps=4)
    assert torch.equal(again.decoder.conv_out.weight, trained.decoder.conv_out.weight)


def test_k_means_start_finds_separate_clusters():
    generator = torch.Generator().manual_seed(0)
    centers = F.normalize(torch.eye(8), dim=-1)
    codes = F.normalize(centers.repeat(50, 1) + 0.05 * torch.randn(400, 8, generator=generator), dim=-1)
    codebook = Codebook(32, 8)
    codebook.start(codes, generator)
    assert (centers @ codebook.entries.T).amax(1).min() > 0.98
    assert codebook(codes[:8]).unique().numel() == 8


def test_unused_entries_restart_at_codes_in_use():
    generator = torch.Generator().manual_seed(0)
    codes = F.normalize(torch.randn(64, 8, generator=generator).abs(), dim=-1)  # one orthant
    codebook = Codebook(16, 8)
    codebook.entries = -F.normalize(torch.ones(16, 8), dim=-1)  # the opposite one
    codebook.sums, codebook.usage = codebook.entries.clone(), torch.zeros(16)
    codebook.update(codes, generator)
    assert (codebook.entries[1:] @ codes.T).amax(1).min() > 0.99  # entry 0 won every tie and is in use
    assert codebook(codes).unique().numel() > 8


def test_accuracy_of_a_constant_decoder_is_the_share_of_empty_cells(trained):
    blank = type(trained)(trained.config).eval()
    torch.nn.init.zeros_(blank.decoder.conv_out.weight)
    blank.decoder.conv_out.bias.data = torch.full((3,), 220 / 127.5 - 1)
    rng = np.random.default_rng(1)
    empty = np.mean([np.array(sample_scene(rng).cells) == "empty" for _ in range(64)])
    assert round_trip_accuracy(blank, num_pictures=64, seed=1) == pytest.approx(empty)


def test_too_few_steps_are_refused(config):
    with pytest.raises(ValueError, match="steps=80 must be greater than warmup_steps=80"):
        train_vq(config, steps=80)
