"""Codes of target pictures are computed once, found again by content, and survive a killed run."""

import base64
import io
import json

import pytest
import torch
from datasets import Dataset
from PIL import Image as PILImage

from janus_trl import image_codes
from janus_trl.data import load_dataset_splits
from janus_trl.image_codes import encode_pictures, picture_keys, with_image_codes
from tests.sft import COLORS, FEATURES, picture, row


def drawn(colors) -> Dataset:
    return Dataset.from_list([row(image=picture(color)) for color in colors], features=FEATURES)


@pytest.fixture
def encoded(model, monkeypatch):
    """The number of pictures in each call of the image tokenizer."""
    calls, tokenizer = [], type(model.model.vqmodel)
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda vq, pixels: calls.append(len(pixels)) or encode(vq, pixels))
    return calls


def test_a_second_pass_encodes_and_opens_no_picture(model, encoded, tmp_path, monkeypatch):
    first = with_image_codes(drawn(COLORS), model, str(tmp_path), 3)
    assert sum(encoded) == 8 and max(encoded) == 3
    encoded.clear()
    monkeypatch.setattr(PILImage, "open", lambda *_: pytest.fail("a picture was opened"))
    second = with_image_codes(drawn(COLORS), model, str(tmp_path))
    assert encoded == [] and second["image_codes"][:] == first["image_codes"][:]
    other = with_image_codes(drawn(COLORS[::-1]), model, str(tmp_path))
    assert encoded == [] and other["image_codes"][:] == first["image_codes"][::-1]


def test_equal_pictures_are_encoded_once(model, encoded, tmp_path):
    codes = with_image_codes(drawn(["red", "blue", "red", "red"]), model, str(tmp_path))["image_codes"][:]
    assert sum(encoded) == 2 and codes[0] == codes[2] == codes[3] != codes[1]


def test_a_killed_run_goes_on_where_it_stopped(model, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(image_codes, "SHARD_SIZE", 2)
    encode = model.model.vqmodel.encode

    def dies(pixels):
        if sum(encoded) == 4:
            raise KeyboardInterrupt
        return encode(pixels)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.model.vqmodel, "encode", dies)
        with_image_codes(drawn(COLORS), model, str(tmp_path))
    assert len(list(tmp_path.glob("*/*.npy"))) == 2 and not list(tmp_path.rglob("*.unfinished"))
    encoded.clear()
    codes = with_image_codes(drawn(COLORS), model, str(tmp_path))["image_codes"][:]
    assert sum(encoded) == 4
    assert codes == encode_pictures(model, [picture(color) for color in COLORS])


def test_other_weights_have_codes_of_their_own(model, encoded, tmp_path):
    with_image_codes(drawn(["red"]), model, str(tmp_path))
    with torch.no_grad():
        model.model.vqmodel.quantize.embedding.weight.mul_(-1)
    codes = with_image_codes(drawn(["red"]), model, str(tmp_path))["image_codes"][0]
    assert encoded == [1, 1] and codes == encode_pictures(model, [picture("red")])[0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_in_bfloat16_has_the_codes_of_its_weights_in_float32(model, tmp_path):
    torch.manual_seed(0)
    pixels = torch.randint(256, (8, 16, 16, 3), dtype=torch.uint8).numpy()
    pictures = [PILImage.fromarray(noise) for noise in pixels]
    vq = model.model.vqmodel.bfloat16().float()  # the weights of both
    exact = encode_pictures(model, pictures)
    vq.bfloat16()
    batch = torch.stack([image_codes._square(noise, 16) for noise in pictures])
    assert vq.encode(batch.bfloat16()).image_tokens.view(8, -1).tolist() != exact  # what rounding makes of them
    rows = Dataset.from_list([row(image=noise) for noise in pictures], features=FEATURES)
    assert with_image_codes(rows, model, str(tmp_path))["image_codes"][:] == encode_pictures(model, pictures) == exact
    assert next(vq.parameters()).dtype == torch.bfloat16  # the model is as it was


def test_a_picture_is_known_by_its_content_wherever_it_is_stored(model, encoded, tmp_path):
    data = io.BytesIO()
    picture("red").save(data, "PNG")
    (tmp_path / "red.png").write_bytes(data.getvalue())
    stored = {"image": [{"bytes": data.getvalue(), "path": None}, {"bytes": None, "path": str(tmp_path / "red.png")}]}
    keys = picture_keys(Dataset.from_dict(stored))
    assert keys[0] == keys[1] and len(keys[0]) == 32
    assert picture_keys(Dataset.from_dict({"image": [str(tmp_path / "red.png")]})) == keys[:1]
    assert picture_keys(Dataset.from_dict({"image": [data.getvalue(), None]})) == [keys[0], None]


@pytest.mark.parametrize("stored", ["relative path", "base64"])
def test_rows_of_a_file_keep_their_reader_and_are_found_again(model, encoded, tmp_path, monkeypatch, stored):
    cells = []
    for color in COLORS[:3]:
        picture(color, (64, 64)).resize((200, 200)).save(tmp_path / f"{color}.png", compress_level=0)
        content = base64.b64encode((tmp_path / f"{color}.png").read_bytes()).decode()
        cells.append(f"{color}.png" if stored == "relative path" else content)
    lines = [json.dumps({"prompt": "q", "image": cell}) for cell in cells]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))

    def rows():
        return load_dataset_splits(str(tmp_path / "rows.jsonl"), task="t2i", stage="sft")["train"]

    first = with_image_codes(rows(), model, str(tmp_path / "codes"))
    assert first.format["type"] == "custom" and "image" not in first.column_names
    assert [first[i]["image_codes"] for i in range(3)] == encode_pictures(model, [picture(c) for c in COLORS[:3]])
    encoded.clear()
    again = rows()
    monkeypatch.setattr(PILImage, "open", lambda *_: pytest.fail("a picture was opened"))
    assert with_image_codes(again, model, str(tmp_path / "codes"))[0] == first[0] and encoded == []


def test_a_file_that_changed_is_encoded_again(model, encoded, tmp_path):
    path = tmp_path / "picture.png"
    codes = []
    for color in ("red", "blue"):
        picture(color).save(path)
        dataset = Dataset.from_dict({"prompt": ["q"], "image": [str(path)]}).cast_column("image", FEATURES["image"])
        codes.append(with_image_codes(dataset, model, str(tmp_path / "codes"))["image_codes"][0])
    assert codes == encode_pictures(model, [picture("red"), picture("blue")]) and codes[0] != codes[1]


def test_a_shuffled_part_of_a_data_set_keeps_codes_with_rows(model, tmp_path):
    rows = [row(prompt=color, image=picture(color)) for color in COLORS] + [row(prompt="none", completion="a")]
    part = Dataset.from_list(rows, features=FEATURES).select([8, 5, 0, 2])
    codes = with_image_codes(part, model, str(tmp_path))
    expected = encode_pictures(model, [picture(COLORS[i]) for i in (5, 0, 2)])
    assert codes["prompt"][:] == ["none", COLORS[5], COLORS[0], COLORS[2]] and codes["image_codes"][:] == [
        [],
        *expected,
    ]
