"""Original DeepSeek Janus to the layout of transformers: `python -m janus_trl.scripts.convert --input … --output …`."""

from dataclasses import dataclass, field
from pathlib import Path

from janus_trl.conversion import Conversion, convert_checkpoint, local_folder
from janus_trl.recipe import or_exit, parse_recipe, refuse_launcher


@dataclass
class ConvertArguments:
    """What is converted, and where to."""

    input: str = field(default=None, metadata={"help": "Folder or Hub id of an original checkpoint."})
    output: str = field(default=None, metadata={"help": "Folder that is made; it must not exist."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub id."})
    template: str = field(
        default="auto",
        metadata={"help": "Words of the turns: `janus_pro`, `janus` (plain words, for Janus-1.3B), or `auto`."},
    )
    max_shard_gb: float = field(default=2.0, metadata={"help": "Size of the weight files, about the memory needed."})

    def __post_init__(self):
        for name in ("input", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set. Use --input DIR_OR_HUB_ID --output DIR.")
        if not self.max_shard_gb > 0:
            raise ValueError(f"max_shard_gb = {self.max_shard_gb} must be > 0 (gigabytes of one weight file).")


def run(argv: list[str]) -> Conversion:
    """Parse, check and convert; a ValueError says what is wrong, before anything is written."""
    (args,) = parse_recipe((ConvertArguments,), argv)
    refuse_launcher("convert", "write the converted model")
    folder = local_folder(args.input, args.revision)
    return convert_checkpoint(folder, Path(args.output), args.template, int(args.max_shard_gb * 1e9))


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    done = or_exit(run, argv)
    files = "1 file" if done.shards == 1 else f"{done.shards} files"
    print(
        f"{done.output}: {done.parameters:,} parameters in {files}, {str(done.dtype).removeprefix('torch.')}, "
        f"embeddings {'tied' if done.tied else 'untied'}, chat template {done.template}.\n"
        f"Train from it with --model_name_or_path {done.output}"
    )


if __name__ == "__main__":
    main()
