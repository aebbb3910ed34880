"""Pictures for prompts, or answers about pictures: `python -m janus_trl.scripts.generate --model DIR --prompts FILE …`.

Started again with the same options it makes only what is missing. With `accelerate launch` every process takes its
share of the batches.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from janus_trl.benchmark_layouts import LAYOUTS, check_layout
from janus_trl.config_checks import at_least, check_prompt_template, one_of
from janus_trl.configs import TEMPLATE_HELP
from janus_trl.generation import Generation, generate, join, prepare, said
from janus_trl.inference import TEXT_LENGTHS, decode_engine, leave, load, usual_text_length
from janus_trl.prompt_files import read_prompts
from janus_trl.recipe import or_exit, parse_recipe


@dataclass
class GenerateArguments:
    """What is generated, with which model, and where it goes."""

    model_name_or_path: str = field(
        default=None, metadata={"help": "Folder (also of an adapter), Hub id, or `tiny`.", "aliases": ["--model"]}
    )
    output_dir: str = field(default=None, metadata={"help": "Folder for pictures, texts and the contact sheet."})
    prompts: str | None = field(
        default=None,
        metadata={"help": "File: .txt with a prompt per line, .jsonl with `prompt`; or a folder of .txt; or `tiny`."},
    )
    prompt: list[str] | None = field(default=None, metadata={"help": "Instead of prompts: one or several texts."})
    image: list[str] | None = field(default=None, metadata={"help": "Pictures that each prompt is asked about (i2t)."})
    task: str | None = field(default=None, metadata={"help": "`t2i` or `i2t`; unset: i2t if image is given."})
    layout: str = field(default="prompts", metadata={"help": f"Of the output folder: {', '.join(LAYOUTS)}."})
    num_images: int | None = field(
        default=None, metadata={"help": "Pictures (or answers) per prompt; unset: as in the benchmark, else 1."}
    )
    max_text_length: int | None = field(
        default=None,
        metadata={
            "help": "Text tokens at most; unset: as it was trained, else 0 (t2i) or 256 (i2t), 24 or 40 of `tiny`."
        },
    )
    guidance_scale: float | None = field(
        default=None, metadata={"help": "t2i, >= 1; unset: that of the checkpoint's generation config, else 5."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Temperature of text."})
    image_temperature: float = field(default=1.0, metadata={"help": "Temperature of image codes."})
    greedy: bool = field(default=False, metadata={"help": "Take the likeliest id instead of sampling."})
    batch_size: int = field(default=32, metadata={"help": "Rows that are sampled at a time."})
    seed: int = field(default=0, metadata={"help": "A row's seed is made of this, its prompt's number and its own."})
    prompt_template: str | None = field(default=None, metadata={"help": TEMPLATE_HELP})
    use_cuda_graphs: bool = field(default=True, metadata={"help": "Capture the decoding steps on a GPU."})

    def __post_init__(self):
        self.task = self.task or ("i2t" if self.image else "t2i")
        one_of(self, "task", tuple(TEXT_LENGTHS))
        check_layout(self.layout)
        if self.task == "i2t" and self.layout != "prompts":
            raise ValueError(f"layout = {self.layout!r} is one of pictures; task i2t writes answers. Leave it unset.")
        if not self.output_dir:
            raise ValueError("output_dir is not set. Use --output_dir FOLDER.")
        if self.max_text_length is None:
            tiny = self.model_name_or_path == "tiny"
            self.max_text_length = usual_text_length(self.model_name_or_path, self.task, tiny)
        at_least(self, "num_images", 1, "pictures or answers per prompt")
        at_least(self, "guidance_scale", 1, "1 is no guidance, Janus was published with 5")
        at_least(self, "max_text_length", 0 if self.task == "t2i" else 1, "0, for t2i only, opens the image at once")
        at_least(self, "batch_size", 1, "rows that are sampled at a time")
        at_least(self, "temperature", 0.01, "for the likeliest ids use --greedy true")
        at_least(self, "image_temperature", 0.01, "for the likeliest ids use --greedy true")
        check_prompt_template(self)


def configure(argv: list[str]) -> tuple[GenerateArguments, Generation, str]:
    """Arguments, run and base checkpoint; a ValueError says what is wrong, before weights load."""
    (args,) = parse_recipe((GenerateArguments,), argv)
    if args.image and args.task == "t2i":
        raise ValueError("image is given with task t2i: input pictures do not condition drawing. Leave task unset.")
    rows = read_prompts(args.prompts, args.prompt, args.image, args.task)
    layout = LAYOUTS[args.layout](rows, args.num_images)
    run, base = prepare(args, layout, Path(args.output_dir), args.model_name_or_path)
    return args, run, base


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args, run, base = or_exit(configure, argv)
    if join(run):  # no weights are needed to see that all is there
        print(f"{run.output}: all {len(run.layout.rows) * run.layout.num_images} are there already.")
        return leave()
    model, processor = load(args.model_name_or_path, base, args.prompt_template)
    made = generate(run, model, processor, decode_engine(model, args.use_cuda_graphs))
    print(said(run, made), file=sys.stderr if run.process else sys.stdout)
    leave()


if __name__ == "__main__":
    main()
