"""Rollout speed: the engine, the plain path, transformers' `generate`, DeepSeek's published loop, and the roofline.

    python benchmarks/rollout.py --size 7b --batch 32 64            # on a GPU; random weights of the real shape
    python benchmarks/rollout.py --size tiny --batch 8              # on a CPU, to test the benchmark itself

One JSON line per measurement. `roofline_s` is (layer and image-head weights + both streams' cache at mean length) over
the copy bandwidth measured in the same run, times the number of codes; for text likewise, with the text head.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parent))
from shapes import build

from janus_trl.engine import DecodeEngine
from janus_trl.prompts import encode_prompts
from janus_trl.sampling import SamplingSettings, rollout, row_seed, score_rollout

WORDS = ("a red circle", "and a blue square", "left of a green cross")


def main() -> None:
    """Measure what the command line asks for."""
    args = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, processor = build(args.size, device, dtype)
    bandwidth = copy_bandwidth(device)
    prompt = prompt_of(processor, args.prompt)
    engine = DecodeEngine(dtype, use_cuda_graphs=device == "cuda")
    for batch in args.batch:
        bench = Bench(args, model, processor, [prompt] * batch, bandwidth)
        for name in args.baselines:
            bench.measure(name, getattr(bench, name), 1)
        bench.measure("engine", partial(bench.ours, engine), args.repeats, engine)
        if args.text:
            bench.text_stage()
        if args.drift:
            bench.drift(engine)
        engine.release()


class Bench:
    """One model and one batch."""

    def __init__(self, args, model, processor, prompts: list[str], bandwidth: float):
        self.args, self.model, self.processor, self.prompts, self.bandwidth = args, model, processor, prompts, bandwidth
        self.seeds = [row_seed(0, "bench", i) for i in range(len(prompts))]
        self.baselines: dict[str, float] = {}
        self.cuda = model.lm_head.weight.device.type == "cuda"

    def settings(self, **changes) -> SamplingSettings:
        return SamplingSettings(**{"guidance_scale": self.args.guidance, **changes})

    def ours(self, engine: DecodeEngine | None, **changes):
        if engine is not None:
            engine.load_weights(self.model)
        return rollout(
            self.model, self.processor, self.prompts, self.settings(**changes), self.seeds, engine=engine, decode=False
        )

    def plain(self):
        return self.ours(None)

    def generate(self):
        inputs = self.image_inputs()
        self.model.generate(
            **inputs, generation_mode="image", guidance_scale=self.args.guidance, do_sample=True, top_k=0
        )

    @torch.no_grad()
    def loop(self):
        """The generation loop that DeepSeek published: eager, a growing cache, both streams interleaved."""
        ids = self.image_inputs()["inputs"]
        tokens = ids.repeat_interleave(2, 0)
        tokens[1::2, 1:-1] = self.model.special_ids.pad
        embeds, cache = self.model.get_input_embeddings()(tokens), DynamicCache()
        for _ in range(self.model.num_image_codes):
            out = self.model.model.language_model(inputs_embeds=embeds, cache=cache, use_cache=True)
            logits = self.model.model.generation_head(out.last_hidden_state[:, -1])
            logits = logits[1::2] + self.args.guidance * (logits[0::2] - logits[1::2])
            code = torch.multinomial(logits.softmax(-1), 1)
            embeds = self.model.prepare_embeddings_for_image_generation(code.repeat_interleave(2, 0))

    def image_inputs(self) -> dict[str, torch.Tensor]:
        encoded = encode_prompts(self.processor, self.prompts, draws=True)
        ids = encoded["input_ids"].to(self.model.lm_head.weight.device)
        opener = torch.full((len(ids), 1), self.model.special_ids.begin_of_image, device=ids.device)
        ids = torch.cat([ids, opener], 1)
        return {"inputs": ids, "attention_mask": torch.ones_like(ids)}

    def measure(self, name: str, run: Callable, repeats: int, engine: DecodeEngine | None = None) -> float:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        warm = engine.warmup_seconds if engine else 0.0  # of batches before this one
        first = timed(run) if engine or repeats > 1 else 0.0
        seconds = statistics.median(timed(run) for _ in range(repeats))
        line = {
            "what": name,
            "size": self.args.size,
            "batch": len(self.prompts),
            "guidance": self.args.guidance,
            "seconds": round(seconds, 3),
            "images_per_s": round(len(self.prompts) / seconds, 2),
            "roofline_s": round(self.roofline(), 3),
            "ratio_to_roofline": round(seconds / self.roofline(), 3),
            "first_run_s": round(first, 2),
        }
        if engine:
            line["warmup_s"] = round(engine.warmup_seconds - warm, 2)
            line |= {f"times_{other}": round(taken / seconds, 2) for other, taken in self.baselines.items()}
        else:
            self.baselines[name] = seconds
        if self.cuda:
            line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        print(json.dumps(line), flush=True)
        return seconds

    def text_stage(self) -> None:
        """Reasoning before an image: the sampling of the text, and all of a rollout up to the end of it."""
        length, config = self.args.text, self.model.generation_config
        eos, config.eos_token_id = config.eos_token_id, [self.model.vocab_size - 1]  # hardly ever sampled
        engine = TextOnly(self.model.lm_head.weight.dtype, use_cuda_graphs=self.cuda)

        def seconds() -> tuple[float, float]:
            start = time.perf_counter()
            self.ours(engine, max_text_length=length)
            return engine.text_ended - engine.text_started, engine.text_ended - start

        seconds()
        runs = [seconds() for _ in range(self.args.repeats)]
        text, whole = (statistics.median(times) for times in zip(*runs, strict=True))
        config.eos_token_id = eos
        roofline = self.text_roofline(length)
        line = {"what": "engine text", "size": self.args.size, "batch": len(self.prompts), "text": length}
        line |= {"seconds": round(text, 4), "roofline_s": round(roofline, 4)}
        line["ratio_to_roofline"] = round(text / roofline, 3)
        line |= {"with_prefill_s": round(whole, 4), "ratio_with_prefill": round(whole / roofline, 3)}
        line["sampled"] = round(engine.state.counts.float().mean().item(), 1)
        print(json.dumps(line), flush=True)
        engine.release()

    def drift(self, engine: DecodeEngine) -> None:
        """|rollout log-prob - replay log-prob| of the codes, for the engine and the plain path."""
        for guidance in (1.0, 5.0):
            for name, one in (("engine", engine), ("plain", None)):
                result = self.ours(one, guidance_scale=guidance)
                replay = score_rollout(self.model, result, self.settings(guidance_scale=guidance))
                mask = [torch.tensor(row).bool() for row in result.env_mask]
                pairs = zip(result.logprobs, replay, mask, strict=True)
                gaps = torch.cat([(torch.tensor(a) - b.cpu())[m].abs() for a, b, m in pairs])
                line = {"what": f"drift {name}", "size": self.args.size, "batch": len(self.prompts)}
                line |= {"guidance": guidance, "mean": gaps.mean().item(), "max": gaps.max().item()}
                line["p99"] = gaps.quantile(0.99).item()
                print(json.dumps(line), flush=True)

    def roofline(self) -> float:
        """Seconds for all codes if weights and cache were read once per code at copy bandwidth."""
        head = self.model.model.generation_head
        weights = self.layer_bytes() + sum(p.numel() * p.element_size() for p in head.parameters())
        codes, streams = self.model.num_image_codes, 2 if self.args.guidance != 1 else 1
        keys = self.args.prompt + 1 + codes / 2
        return codes * (weights + streams * len(self.prompts) * keys * self.key_bytes()) / self.bandwidth

    def text_roofline(self, length: int) -> float:
        head = self.model.lm_head.weight
        weights = self.layer_bytes() + head.numel() * head.element_size()
        keys = self.args.prompt + length / 2
        return length * (weights + len(self.prompts) * keys * self.key_bytes()) / self.bandwidth

    def layer_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.model.language_model.layers.parameters())

    def key_bytes(self) -> int:
        """Bytes of one position of one row: keys and values of all layers."""
        layer = self.model.model.language_model.layers[0].self_attn.k_proj
        return 2 * layer.out_features * layer.weight.element_size() * self.model.config.text_config.num_hidden_layers


class TextOnly(DecodeEngine):
    """Notes when the text begins and ends, and samples no codes."""

    def text(self, *args, **kwargs):
        """As in `DecodeEngine`."""
        self.text_started = moment()
        counts = super().text(*args, **kwargs)
        self.text_ended = moment()
        return counts

    def image(self, *args, **kwargs) -> None:
        """Nothing: codes stay 0."""


def timed(run: Callable) -> float:
    """Wall seconds of `run`, the device's work included."""
    start = moment()
    run()
    return moment() - start


def moment() -> float:
    """The time when the device has done all that it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large copy, reads plus writes."""
    size = 2**31 if device == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source)) for _ in range(7))
    return 2 * size / seconds


def prompt_of(processor, length: int) -> str:
    """A prompt of `length` ids with its template."""
    words: list[str] = []
    while len(encode_prompts(processor, [" ".join(words)])["input_ids"][0]) < length:
        words.append(" ".join(WORDS).split()[len(words) % 10])
    return " ".join(words)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "1b", "7b"), default="tiny")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--prompt", type=int, default=32, help="ids of the prompt")
    parser.add_argument("--text", type=int, default=0, help="also time reasoning of so many ids")
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baselines", nargs="*", default=[], choices=("plain", "generate", "loop"))
    parser.add_argument("--drift", action="store_true", help="compare rollout and replay log-probs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
