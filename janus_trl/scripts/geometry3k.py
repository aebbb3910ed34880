"""Geometry3K as multiple choice: `python -m janus_trl.scripts.geometry3k --dataset NAME --output geo3k/train.jsonl`.

Writes one JSON line a question (prompt, images, choices, answer) and the pictures, in a folder beside the file. Takes
any data set on disk or on the Hub with a picture, a problem and a numeric answer, or with choices and a letter.
"""

import argparse
import json
import sys
from pathlib import Path

from janus_trl.data import load_dataset_splits
from janus_trl.data_checks import read_row
from janus_trl.recipe import or_exit


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="janus_trl.scripts.geometry3k", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, help="file, folder or Hub id, e.g. hiyouga/geometry3k")
    parser.add_argument("--output", required=True, type=Path, help="the .jsonl file to write")
    parser.add_argument("--config", help="configuration of a Hub data set")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0, help="seed of the wrong options and of their order")
    parser.add_argument("--text_column", help="the problem; default: problem, question or prompt")
    parser.add_argument("--image_column", help="the picture or pictures; default: images or image")
    parser.add_argument("--answer_column", help="default: answer or ground_truth")
    parser.add_argument("--choices_column", help="the options, if there are any; default: choices or options")
    return parser.parse_args(argv)


def convert(argv: list[str]) -> str:
    """Write the file; returns a line that says what was written.

    Raises:
        ValueError: The data cannot be read or converted, or the output is no .jsonl file.
    """
    args = parse(argv)
    if args.output.suffix != ".jsonl":
        raise ValueError(f"output is '{args.output}'; give a name that ends in .jsonl.")
    named = {"text_column": args.text_column, "answer_column": args.answer_column}
    rows = load_dataset_splits(
        args.dataset,
        task="i2t",
        dataset_config=args.config,
        dataset_format="geometry3k",
        train_split=args.split,
        image_column=args.image_column,
        choices_column=args.choices_column,
        seed=args.seed,
        **{field: column for field, column in named.items() if column},
    )["train"]
    pictures = args.output.with_name(f"{args.output.stem}_images")
    pictures.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8") as file:
        for i in range(len(rows)):
            row = read_row(rows, i)
            names = []
            for j, picture in enumerate(row["images"]):
                names.append(f"{pictures.name}/{i:05d}{f'_{j}' if j else ''}.png")
                picture.save(args.output.parent / names[-1])
            line = {"prompt": row["prompt"], "images": names, "choices": row["choices"], "answer": row["answer"]}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return f"{len(rows)} questions in {args.output}, their pictures in {pictures}"


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    print(or_exit(convert, sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    main()
