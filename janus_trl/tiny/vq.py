"""Trains the image tokenizer of the tiny model: transformers' `JanusVQVAE` on pictures of the embedded world.

Codes are L2-normalized and the codebook is an exponential moving average (van den Oord et al., 2017, appendix A.1, with
normalization as in ViT-VQGAN, Yu et al., 2022). The stored codebook has unit norm: `JanusVQVAE.decode` normalizes
entries while `encode` measures distances to the raw ones, so any other norm makes the two disagree.

``python -m janus_trl.tiny.vq --output DIR`` trains and saves one.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import JanusVQVAE, JanusVQVAEConfig

from janus_trl.tiny.grader import read_picture
from janus_trl.tiny.processor import build_config, build_tokenizer
from janus_trl.tiny.world import BACKGROUND, Scene, render_batch, sample_scene

WARMUP_STEPS = 80  # steps without quantization, whose last codes start the codebook by k-means
KMEANS_ROUNDS = 10
DECAY = 0.99
DEAD_USAGE = 0.5  # codes used less often than this in a batch (moving average) restart at a random code
COMMITMENT, CONSISTENCY = 0.25, 0.05
SHAPE_WEIGHT = 2.0  # weight of pixels that differ from the background


class Codebook(nn.Module):
    """Unit-norm codebook kept as a moving average of the codes assigned to each entry."""

    def __init__(self, num_embeddings: int, embed_dim: int) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(num_embeddings, embed_dim))
        self.register_buffer("sums", torch.zeros(num_embeddings, embed_dim))
        self.register_buffer("usage", torch.zeros(num_embeddings))

    def start(self, codes: Tensor, generator: torch.Generator) -> None:
        """Spherical k-means on unit-norm codes (n, dim)."""
        self.entries = codes[_draw(len(codes), len(self.entries), generator, codes.device)].clone()
        for _ in range(KMEANS_ROUNDS):
            counts, sums = self._assign(codes)[1:]
            self.entries = torch.where(counts[:, None] > 0, F.normalize(sums, dim=-1), self.entries)
        self.usage = counts * (1.0 / counts.mean())
        self.sums = self.entries * self.usage[:, None]

    def forward(self, codes: Tensor) -> Tensor:
        """Index of the nearest entry of each code (..., dim), (...)."""
        return (codes @ self.entries.T).argmax(-1)

    def update(self, codes: Tensor, generator: torch.Generator) -> None:
        """Move every entry towards the codes assigned to it; restart entries that are hardly used."""
        counts, sums = self._assign(codes)[1:]
        self.usage.lerp_(counts, 1 - DECAY)
        self.sums.lerp_(sums, 1 - DECAY)
        dead = self.usage < DEAD_USAGE
        fresh = codes[_draw(len(codes), len(self.entries), generator, codes.device)]
        self.sums = torch.where(dead[:, None], fresh, self.sums)
        self.usage = torch.where(dead, torch.ones_like(self.usage), self.usage)
        self.entries = F.normalize(self.sums, dim=-1)

    def _assign(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Nearest entry of each code, and for each entry the number and the sum of its codes."""
        indices = self(codes)
        counts = torch.zeros_like(self.usage).index_add_(0, indices, torch.ones_like(codes[:, 0]))
        return indices, counts, torch.zeros_like(self.sums).index_add_(0, indices, codes)


def train_vq(
    config: JanusVQVAEConfig,
    steps: int = 400,
    seed: int = 0,
    device: str | torch.device = "cpu",
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    warmup_steps: int = WARMUP_STEPS,
) -> JanusVQVAE:
    """Train an image tokenizer on random scenes and print its progress.

    Args:
        config: sizes of the model, as in `JanusConfig.vq_config` (which sets `num_patches`).
        steps: optimizer steps; the learning rate falls to zero over them (cosine).
        seed: seed of the initialization, the scenes and the k-means start.
        device: where to train.
        batch_size: pictures a step, two of each scene.
        learning_rate: peak of AdamW.
        warmup_steps: first steps without quantization.

    Returns:
        The model on `device`, in evaluation mode and float32, its codebook of unit norm.

    Raises:
        ValueError: if `warmup_steps` is not positive or `steps` leaves none after them.
    """
    if not 0 < warmup_steps < steps:
        raise ValueError(f"steps={steps} must be greater than warmup_steps={warmup_steps}, and that greater than 0.")
    torch.manual_seed(seed)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    model = JanusVQVAE(config).to(device).train()
    codebook = Codebook(config.num_embeddings, config.embed_dim).to(device)
    model.quantize.embedding.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.98), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
    start, held = time.monotonic(), []
    for step in range(steps):
        pixels, target = (pictures.to(device) for pictures in _sample_pairs(batch_size // 2, rng))
        loss, codes = _step_loss(model, codebook, pixels, target, quantize=step >= warmup_steps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step < warmup_steps:
            held = (held + [codes])[-8:]  # the last batches: earlier codes come from another encoder
            if step == warmup_steps - 1:
                codebook.start(torch.cat(held), generator)
        else:
            codebook.update(codes, generator)
        if step % 100 == 99:
            print(f"vq step {step + 1}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)
    model.quantize.embedding.weight.data.copy_(codebook.entries)
    model.requires_grad_(True).eval()
    print(f"vq round-trip cell accuracy {round_trip_accuracy(model):.4f}, {time.monotonic() - start:.0f} s", flush=True)
    return model


def to_pixels(pictures: np.ndarray) -> Tensor:
    """Model input (n, 3, height, width) in [-1, 1] from uint8 pictures (n, height, width, 3)."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def to_pictures(pixels: Tensor) -> list[Image.Image]:
    """RGB pictures from model output (n, 3, height, width) in [-1, 1]."""
    values = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(array) for array in values.permute(0, 2, 3, 1).cpu().numpy()]


@torch.no_grad()
def round_trip(model: JanusVQVAE, pictures: np.ndarray) -> list[Image.Image]:
    """Pictures (n, height, width, 3) uint8 after encoding to image codes and decoding."""
    weight = model.quantize.embedding.weight
    pixels = to_pixels(pictures).to(weight.device, weight.dtype)
    codes = model.encode(pixels).image_tokens.view(len(pictures), -1)
    return to_pictures(model.decode(codes))


def round_trip_accuracy(model: JanusVQVAE, num_pictures: int = 256, seed: int = 1) -> float:
    """Share of cells of random pictures that read the same after encoding and decoding."""
    rng = np.random.default_rng(seed)
    scenes: Sequence[Scene] = [sample_scene(rng) for _ in range(num_pictures)]
    readings = read_picture(round_trip(model, render_batch(scenes, rng)))
    return float(np.mean([np.array(scene.cells) == np.array(seen) for scene, seen in zip(scenes, readings)]))


def _sample_pairs(num_scenes: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Two pictures of each of some random scenes, first all first ones, and the same scenes without jitter."""
    scenes = [sample_scene(rng) for _ in range(num_scenes)] * 2
    return to_pixels(render_batch(scenes, rng)), to_pixels(render_batch(scenes, rng, jitter=0.0))


def _step_loss(
    model: JanusVQVAE, codebook: Codebook, pixels: Tensor, target: Tensor, quantize: bool
) -> tuple[Tensor, Tensor]:
    """Loss of a batch of `_sample_pairs`, and its unit-norm codes (n, dim), detached.

    The target has no jitter and both pictures of a scene are pulled to the same codes: what the eye cannot see then
    costs no entropy of the codes (.17 instead of .49 nats a position), which a policy would have to model as noise.
    """
    latents = F.normalize(model.quant_conv(model.encoder(pixels)), dim=1)  # (b, dim, h, w)
    first, second = latents.chunk(2)
    consistency = (first - second).square().sum(1).mean()
    codes = latents.permute(0, 2, 3, 1)  # (b, h, w, dim)
    commitment = pixels.new_zeros(())
    if quantize:
        nearest = codebook.entries[codebook(codes)].permute(0, 3, 1, 2)
        commitment = F.mse_loss(latents, nearest)
        latents = latents + (nearest - latents).detach()
    background = torch.tensor(BACKGROUND, device=pixels.device).view(1, 3, 1, 1) / 127.5 - 1
    shape = ((target - background).abs().amax(1, keepdim=True) > 0.05).float()
    error = (model.decoder(model.post_quant_conv(latents)) - target).square()
    loss = (error * (1 + (SHAPE_WEIGHT - 1) * shape)).mean()
    return loss + COMMITMENT * commitment + CONSISTENCY * consistency, codes.detach().flatten(0, 2)


def _draw(population: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Random indices, drawn on the CPU so that they are the same on every device."""
    return torch.randint(population, (count,), generator=generator).to(device)


def main() -> None:
    """Train one image tokenizer and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, help="folder to save to")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    vq_config = build_config(build_tokenizer()).vq_config
    train_vq(vq_config, steps=args.steps, seed=args.seed, device=args.device).save_pretrained(args.output)


if __name__ == "__main__":
    main()
