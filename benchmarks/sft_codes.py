"""What the cache of image codes saves: the first and the second pass over the pictures of an SFT data set.

`python benchmarks/sft_codes.py --rows 2048` prints one JSON line. A pass turns the target pictures of all rows into
codes; the second finds them by their content, opens no picture and does not run the image tokenizer.
"""

import argparse
import json
import tempfile
import time

import torch
from transformers import JanusProcessor

from janus_trl.image_codes import with_image_codes
from janus_trl.modeling import JanusForInterleavedGeneration, bind_special_ids
from janus_trl.recipe import resolve_model
from janus_trl.tiny.datasets import tiny_sft_dataset


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="folder, Hub id or `tiny`")
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args(argv)
    folder, device = resolve_model(options.model), "cuda" if torch.cuda.is_available() else "cpu"
    model = JanusForInterleavedGeneration.from_pretrained(folder, dtype=torch.float32)
    bind_special_ids(model, JanusProcessor.from_pretrained(folder))
    rows, calls, encode = tiny_sft_dataset("t2i", "train", size=options.rows), [], model.model.vqmodel.encode
    model.model.vqmodel.encode = lambda pixels: calls.append(len(pixels)) or encode(pixels)
    seconds, encoded, results = [], [], []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            calls.clear()
            start = time.perf_counter()
            results.append(with_image_codes(rows, model, cache, device=device)["image_codes"][:])
            seconds.append(time.perf_counter() - start)
            encoded.append(sum(calls))
    line = {
        "benchmark": "sft_codes",
        "model": options.model,
        "device": device,
        "threads": torch.get_num_threads(),
        "rows": options.rows,
        "first_s": round(seconds[0], 3),
        "second_s": round(seconds[1], 3),
        "speedup": round(seconds[0] / seconds[1], 1),
        "encoded": encoded,
        "equal": results[0] == results[1],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
