"""Where the pictures of a generation stand, so that the official scorers of benchmarks find them.

* GenEval (github.com/djghosh13/geneval, README): `00000/metadata.jsonl`, `00000/samples/0000.png`, `00000/grid.png`.
* T2I-CompBench (github.com/Karine-Huang/T2I-CompBench): `samples/{prompt}_{000000}.png`; its scorers take the prompt
  from the name up to the first `_`, and the order from the number, which runs over all pictures.
* DPG-Bench (github.com/TencentQQGYLab/ELLA, `dpg_bench`): `images/{item}.png`, four pictures as a grid of 2x2 (pass
  `--image-root-path …/images --pic-num 4 --resolution` and the width of one picture).
* prompts: `images/00000-0000.png`, of no benchmark.

Nothing else may stand in the folders that a scorer lists: texts, settings and parts are kept beside them.
"""

import io
import json
import math
from collections.abc import Sequence

from PIL import Image

from .config_checks import did_you_mean
from .prompt_files import PromptRow

MAX_NAME_BYTES = 255  # of a file, on common file systems


class PromptsLayout:
    """`images/00000-0000.png`; the base of the others."""

    name, default_num_images = "prompts", 1

    def __init__(self, rows: Sequence[PromptRow], num_images: int | None = None):
        self.rows, self.num_images = rows, num_images or self.default_num_images
        self.check()

    def check(self) -> None:
        """Refuse what the layout cannot hold.

        Raises:
            ValueError: naming the prompt and the rule.
        """

    def picture(self, index: int, sample: int) -> str:
        """The path of one picture, relative to the output folder."""
        return f"images/{index:05d}-{sample:04d}.png"

    def texts(self, index: int) -> dict[str, str]:
        """Text files of a prompt: relative path -> content."""
        return {}

    def grid(self, index: int) -> str | None:
        """The path of the picture that joins all pictures of a prompt; None if there is none."""
        return None


class GenEvalLayout(PromptsLayout):
    """`00000/metadata.jsonl`, `00000/samples/0000.png`, `00000/grid.png`."""

    name, default_num_images = "geneval", 4

    def check(self) -> None:
        for i, row in enumerate(self.rows):
            if missing := [key for key in ("tag", "include") if key not in row.metadata]:
                raise ValueError(
                    f"prompt {i} ({row.prompt!r}) lacks {', '.join(missing)}, which the GenEval scorer reads: give its "
                    "evaluation_metadata.jsonl, or use layout: prompts."
                )

    def picture(self, index: int, sample: int) -> str:
        return f"{index:05d}/samples/{sample:04d}.png"

    def texts(self, index: int) -> dict[str, str]:
        return {f"{index:05d}/metadata.jsonl": json.dumps(self.rows[index].metadata) + "\n"}

    def grid(self, index: int) -> str:
        return f"{index:05d}/grid.png"


class CompBenchLayout(PromptsLayout):
    """`samples/{prompt}_{000000}.png`."""

    name, default_num_images = "t2i_compbench", 10

    def check(self) -> None:
        for i, row in enumerate(self.rows):
            name = self.picture(i, 0).removeprefix("samples/")
            wrong = [character for character in "/_\0\n" if character in row.prompt]
            if wrong or len(name.encode()) > MAX_NAME_BYTES:
                long = f"{len(name.encode())} bytes, {MAX_NAME_BYTES} are the most"
                why = f"it holds {wrong[0]!r}" if wrong else long
                raise ValueError(
                    f"prompt {i} ({row.prompt[:60]!r}): T2I-CompBench takes prompts from file names, and this one "
                    f"cannot be a name ({why}). Reword it, or use layout: prompts."
                )

    def picture(self, index: int, sample: int) -> str:
        return f"samples/{self.rows[index].prompt}_{index * self.num_images + sample:06d}.png"


class DPGLayout(PromptsLayout):
    """`images/{item}.png` of four pictures, which are kept in `parts/` too."""

    name, default_num_images = "dpg", 4

    def check(self) -> None:
        if self.num_images not in (1, 4):
            raise ValueError(f"num_images = {self.num_images} must be 4 (the 2x2 grid of DPG-Bench) or 1.")
        for i, row in enumerate(self.rows):
            if "." in row.name:
                raise ValueError(
                    f"prompt {i}: DPG-Bench reads the name of an item up to the first '.', not {row.name!r}."
                )

    def picture(self, index: int, sample: int) -> str:
        return f"parts/{self.rows[index].name}-{sample}.png"

    def grid(self, index: int) -> str:
        return f"images/{self.rows[index].name}.png"


LAYOUTS = {layout.name: layout for layout in (PromptsLayout, GenEvalLayout, CompBenchLayout, DPGLayout)}


def check_layout(name: str, field: str = "layout") -> None:
    """Refuse an unknown layout, suggesting the nearest."""
    if name not in LAYOUTS:
        raise ValueError(f"{field} = {name!r} must be one of: {', '.join(LAYOUTS)}.{did_you_mean(name, LAYOUTS)}")


def tiled(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures of one size in rows, near square and without margins (four: 2x2)."""
    width, height = pictures[0].size
    columns = math.ceil(len(pictures) ** 0.5)
    canvas = Image.new("RGB", (columns * width, math.ceil(len(pictures) / columns) * height))
    for i, picture in enumerate(pictures):
        canvas.paste(picture, (i % columns * width, i // columns * height))
    return canvas


def png(picture: Image.Image) -> bytes:
    """A picture as the content of a PNG file."""
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
