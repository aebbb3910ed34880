"""The aesthetic head on a small random CLIP: the formula, and what is refused."""

import numpy as np
import pytest
import torch
from transformers import CLIPModel, CLIPProcessor

from janus_trl.rewards import get_reward_funcs
from tests.clip import CAPTIONS, pictures, save_clip

LAYERS = {0: (8, 12), 2: (12, 6), 4: (6, 4), 6: (4, 3), 7: (3, 1)}  # numbered as in the published file


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> str:
    return save_clip(str(tmp_path_factory.mktemp("clip")))


def build(**args):
    return get_reward_funcs({"name": "aesthetic", "args": args}, "t2i", ["prompt"])


def save_head(path, layers=LAYERS, prefix="layers.{}.") -> str:
    torch.manual_seed(1)
    state = {}
    for number, (width, out) in layers.items():
        name = prefix.format(number)
        state |= {f"{name}weight": torch.randn(out, width), f"{name}bias": torch.randn(out)}
    torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_aesthetic_is_the_head_on_unit_picture_features(clip_folder, tmp_path, kind):
    layers, prefix = (LAYERS, "layers.{}.") if kind == "mlp" else ({0: (8, 1)}, "")
    head = save_head(tmp_path / "head.pth", layers, prefix)
    values = build(head=head, model=clip_folder, batch_size=4).funcs[0](
        prompts=CAPTIONS, completions=CAPTIONS, generated_images=pictures()
    )
    model, processor = CLIPModel.from_pretrained(clip_folder).eval(), CLIPProcessor.from_pretrained(clip_folder)
    state, expected = torch.load(head), []
    for picture in pictures():
        pixels = processor.image_processor(images=picture, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            x = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output[0])
            x = x / x.norm()
            for number in layers:
                x = state[prefix.format(number) + "weight"] @ x + state[prefix.format(number) + "bias"]
        expected.append(x.item())
    assert values == pytest.approx(expected, abs=1e-4) and np.std(expected) > 0.01


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({0: (9, 1)}, r"head '.*' has 9 -> 1; the CLIP model's features have width 8"),
        ({0: (8, 4), 2: (4, 2)}, "8 -> 4, 4 -> 2"),
        ({0: (8, 4), 2: (5, 1)}, "8 -> 4, 5 -> 1"),
        ({}, "no linear layers"),
    ],
)
def test_heads_that_do_not_fit_are_refused(clip_folder, tmp_path, layers, message):
    head = save_head(tmp_path / "head.pth", layers)
    with pytest.raises(ValueError, match=message):
        build(head=head, model=clip_folder).load()


def test_a_file_that_is_no_head_is_refused(clip_folder, tmp_path):
    (tmp_path / "head.pth").write_bytes(b"no")
    with pytest.raises(ValueError, match="reward 'aesthetic': head .* cannot be read"):
        build(head=str(tmp_path / "head.pth"), model=clip_folder).load()
