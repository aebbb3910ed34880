"""Merge an adapter: `python -m janus_trl.scripts.merge --adapter outputs/run --output_dir outputs/run-merged`."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from janus_trl.adapter_files import adapter_base, adapter_folder
from janus_trl.config_checks import one_of
from janus_trl.merging import merge
from janus_trl.model_card import merged_card
from janus_trl.recipe import or_exit, parse_recipe, refuse_launcher, resolve_model
from janus_trl.weight_files import ADAPTER

DTYPES = ("float32", "bfloat16")


@dataclass
class MergeArguments:
    """What is merged into what."""

    adapter: str | None = field(
        default=None, metadata={"help": "PEFT adapter: a folder, e.g. an output_dir, or Hub id."}
    )
    base: str | None = field(default=None, metadata={"help": "Folder or Hub id; unset: the one the adapter names."})
    output_dir: str | None = field(default=None, metadata={"help": "Where the stock Janus folder is written."})
    dtype: str = field(
        default="bfloat16",
        metadata={"help": "Of the saved weights, float32 or bfloat16; the sum is formed in float32."},
    )


def configure(argv: list[str]) -> MergeArguments:
    """Checked arguments, with the base filled in; no weights are loaded yet.

    Raises:
        ValueError: what is wrong and how to mend it.
    """
    (args,) = parse_recipe((MergeArguments,), argv)
    refuse_launcher("merge", "write the merged model")
    one_of(args, "dtype", DTYPES)
    for name in ("adapter", "output_dir"):
        if not getattr(args, name):
            raise ValueError(f"{name} is not set. Use --adapter FOLDER --output_dir FOLDER.")
    folder = adapter_folder(args.adapter)
    if folder is None or not (Path(folder) / ADAPTER).is_file():
        raise ValueError(
            f"adapter = {args.adapter} has no {ADAPTER}. Give the output_dir or a checkpoint of a run with use_peft."
        )
    if Path(args.output_dir).resolve() == Path(args.adapter).resolve():
        raise ValueError(f"output_dir = {args.output_dir} is the folder of the adapter. Choose another one.")
    args.base = resolve_model(args.base or adapter_base(args.adapter))
    return args


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = or_exit(configure, argv)
    dtype = getattr(torch, args.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        exact, saved = merge(adapter_folder(args.adapter), args.base, args.output_dir, dtype, device)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    lines = [f"merged in float32: {exact}", f"saved in {args.dtype}: {saved}"]
    (Path(args.output_dir) / "README.md").write_text(merged_card(args.adapter, args.base, args.output_dir, lines))
    print(*[f"Compared with base + adapter, {line}." for line in lines], f"Written: {args.output_dir}", sep="\n")


if __name__ == "__main__":
    main()
