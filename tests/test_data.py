"""Loading pictures and data sets, and refusing bad ones."""

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from janus_trl.data import check_dataset, check_images, load_dataset_splits, load_image, load_training_dataset
from janus_trl.images import limit_image_size

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real prompts and pictures is absent")


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(image: Image.Image) -> tuple[int, ...]:
    return image.getpixel((0, 0))


# ---------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "LAB", "I",
                                  "I;16", "I;16B", "F"])  # fmt: skip
def test_every_mode_becomes_rgb_of_the_same_size(mode):
    image = load_image(Image.new(mode, (20, 10)))
    assert (image.mode, image.size) == ("RGB", (20, 10))


@pytest.mark.parametrize(
    "image",
    [
        Image.new("RGBA", (4, 4), (255, 0, 0, 0)),
        Image.new("LA", (4, 4), (0, 0)),
        Image.new("RGBA", (4, 4), (255, 0, 0, 0)).convert("P"),
    ],
    ids=["RGBA", "LA", "P"],
)
def test_transparency_is_laid_on_white(image):
    if image.mode == "P":
        image.info["transparency"] = image.getpixel((0, 0))
    assert pixel(load_image(image)) == (255, 255, 255)


def test_half_transparent_black_on_white_is_grey():
    assert pixel(load_image(Image.new("RGBA", (4, 4), (0, 0, 0, 128)))) == (127, 127, 127)


def test_an_rgb_file_with_a_transparent_colour_gets_white_there():
    content = encode(Image.new("RGB", (4, 4), (9, 8, 7)), transparency=(9, 8, 7))
    assert pixel(load_image(content)) == (255, 255, 255)


def test_16_bit_grey_is_scaled_and_not_clipped():
    values = np.full((4, 6), 32768, dtype=np.uint16)
    assert pixel(load_image(Image.fromarray(values))) == (128, 128, 128)
    assert pixel(load_image(encode(Image.fromarray(values)))) == (128, 128, 128)
    assert pixel(load_image(Image.fromarray(values.astype(np.int32)))) == (128, 128, 128)


def test_cmyk_is_not_inverted():
    assert pixel(load_image(Image.new("CMYK", (4, 4), (0, 255, 255, 0)))) == (255, 0, 0)


def test_floats_up_to_one_span_black_to_white():
    assert pixel(load_image(Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)))) == (127, 127, 127)
    assert pixel(load_image(Image.fromarray(np.full((2, 2), 90.0, dtype=np.float32)))) == (90, 90, 90)


def test_exif_orientation_is_applied_once():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    once = load_image(encode(Image.new("RGB", (20, 10)), "JPEG", exif=exif))
    assert once.size == (10, 20)
    assert load_image(once).size == (10, 20)


def test_every_kind_of_source_gives_the_same_picture(tmp_path):
    content = encode(Image.new("RGB", (5, 3), (1, 2, 3)))
    path = tmp_path / "a picture.png"
    path.write_bytes(content)
    text = base64.b64encode(content).decode()
    sources = [path, str(path), content, bytearray(content), {"bytes": content, "path": None}, text]
    sources += [{"bytes": None, "path": str(path)}, f"data:image/png;base64,{text}", Image.open(path)]
    for source in sources:
        image = load_image(source)
        assert (image.mode, image.size, pixel(image)) == ("RGB", (5, 3), (1, 2, 3))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_the_input_is_never_changed(mode):
    source = Image.new(mode, (4, 4), 1)
    before = (source.mode, source.tobytes(), dict(source.info))
    result = load_image(source)
    result.putpixel((0, 0), (200, 200, 200))
    assert (source.mode, source.tobytes(), dict(source.info)) == before
    assert load_image(source) is not source


def test_unreadable_files_are_named(tmp_path):
    jpeg = encode(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)), "JPEG")
    for name, content in {"half.jpg": jpeg[: len(jpeg) // 2], "nothing.png": b"", "text.png": b"no picture"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.* cannot be read"):
            load_image(tmp_path / name)
        with pytest.raises(ValueError, match=rf"<{len(content)} bytes> cannot be read"):
            load_image(content)
    with pytest.raises(ValueError, match="missing.png.*no such file"):
        load_image(tmp_path / "missing.png")
    with pytest.raises(ValueError, match="'missing.png'.*no such file"):
        load_image("missing.png")


@pytest.mark.parametrize(
    "source", [None, 3, [], {}, {"bytes": None, "path": None}, "", "https://a.org/b.png", "A" * 99]
)
def test_what_is_no_picture_is_refused_in_one_line(source):
    with pytest.raises(ValueError, match="^image .*") as error:
        load_image(source)
    assert "\n" not in str(error.value)


def test_decompression_bombs_are_refused_by_pils_guard(monkeypatch):
    content = encode(Image.new("1", (400, 400)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="too large.*MAX_IMAGE_PIXELS"):
        load_image(content)


def test_a_huge_picture_is_refused_without_decoding_it():
    content = encode(Image.new("1", (20_000, 20_000)))  # 50 kB that would become 1.2 GB
    with pytest.raises(ValueError, match="too large.*400000000 pixels.*max_image_pixels"):
        load_image(content)


def test_the_limit_of_pixels_is_a_setting(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    limit_image_size(100)
    assert load_image(encode(Image.new("L", (10, 10)))).size == (10, 10)
    with pytest.raises(ValueError, match="too large"):
        load_image(encode(Image.new("L", (20, 10))))
    with pytest.raises(ValueError, match="max_image_pixels is 0"):
        limit_image_size(0)


def test_a_png_with_a_text_bomb_is_refused():
    info = PngInfo()
    info.add_text("comment", "a" * 100_000_000, zip=True)
    with pytest.raises(ValueError, match="cannot be read: Decompressed data too large"):
        load_image(encode(Image.new("L", (4, 4)), pnginfo=info))


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.new("P", (4, 4), 1), Image.new("P", (4, 4), 2)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 200, 0, 0, 0, 0, 200])
    assert pixel(load_image(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))) == (200, 0, 0)


def test_a_palette_with_a_transparent_entry_is_white_there_and_coloured_elsewhere():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putpixel((1, 0), 1)
    loaded = load_image(encode(image, transparency=bytes([0, 255])))
    assert [loaded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 0, 0)]


def test_48_bit_colour_keeps_its_high_bytes():
    content = png_48_bit([(0x80FF, 0x0100, 0xFFFF)])
    assert pixel(load_image(content)) == (0x80, 0x01, 0xFF)


def png_48_bit(pixels: list[tuple[int, int, int]]) -> bytes:
    """A PNG of one line with 16 bits a channel, which PIL cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    line = b"\0" + b"".join(struct.pack(">3H", *values) for values in pixels)
    header = struct.pack(">IIBBBBB", len(pixels), 1, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(line)) + chunk(b"IEND", b"")


@needs_shared
def test_real_pictures_load():
    sizes = {path.name: load_image(path).size for path in sorted((SHARED / "images").glob("*.png"))}
    assert sizes == {"equation.png": (1050, 344), "logo.png": (780, 165), "pie_chart.png": (1280, 960)}


# --------------------------------------------------------------------------------------------------------- data sets


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(name, task="t2i", **options):
    return load_dataset_splits(str(name), task=task, **options)["train"]


def test_a_text_file_has_one_prompt_per_line(tmp_path):
    (tmp_path / "p.txt").write_bytes("a cat\r\nein Hund, größer\n  two words  \n\n\n".encode())
    dataset = load(tmp_path / "p.txt")
    assert dataset.column_names == ["prompt"]
    assert list(dataset["prompt"]) == ["a cat", "ein Hund, größer", "  two words  "]
    assert list(load(tmp_path / "p.txt", train_split="train[1:2]")["prompt"]) == ["ein Hund, größer"]


def test_every_table_format_gives_the_same_rows(tmp_path):
    rows = [{"text": "a", "demands": "x"}, {"text": "b", "demands": "y"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "d.parquet"))
    table.to_csv(str(tmp_path / "d.csv"))
    write(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table).save_to_disk(str(tmp_path / "saved_splits"))
    for name in ("d.parquet", "d.csv", "d.jsonl", "d.json", "saved", "saved_splits"):
        dataset = load(tmp_path / name, text_column="text")
        assert [dict(row) for row in dataset] == [{"prompt": r["text"], "demands": r["demands"]} for r in rows], name


def test_pictures_come_out_as_lists_of_rgb_whatever_the_rows_hold(tmp_path):
    Image.new("RGBA", (20, 10), (255, 0, 0, 255)).save(tmp_path / "red.png")
    Image.new("L", (5, 5), 7).save(tmp_path / "grey.png")
    rows = [{"prompt": "q", "images": cell} for cell in (["red.png"], None, [], ["red.png", "grey.png"])]
    rows.append({"prompt": "no key"})
    dataset = load(write(tmp_path / "d.jsonl", rows), task="i2t")
    assert [len(row["images"]) for row in dataset] == [1, 0, 0, 2, 0]
    assert [(i.mode, i.size, pixel(i)) for i in dataset[3]["images"]] == [
        ("RGB", (20, 10), (255, 0, 0)),
        ("RGB", (5, 5), (7, 7, 7)),
    ]


def test_a_single_image_column_and_none_at_all_become_lists(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    single = write(tmp_path / "single.jsonl", [{"prompt": "q", "image": "a.png"}, {"prompt": "r", "image": None}])
    assert [len(row["images"]) for row in load(single, task="i2t")] == [1, 0]
    assert load(single, task="i2t").column_names == ["prompt", "images"]
    text_only = write(tmp_path / "none.jsonl", [{"prompt": "q"}])
    assert load(text_only, task="i2t")[0]["images"] == []


def test_stored_image_features_are_read_by_our_loader(tmp_path):
    pictures = [Image.new("RGBA", (6, 6), (0, 0, 0, 0)), Image.new("RGB", (6, 6), (1, 2, 3))]
    features = datasets.Features({"q": datasets.Value("string"), "pics": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_dict({"q": ["a", "b"], "pics": [pictures, pictures[1:]]}, features=features)
    table.save_to_disk(str(tmp_path / "d"))
    dataset = load(tmp_path / "d", task="i2t", text_column="q", image_column="pics")
    assert [pixel(image) for image in dataset[0]["images"]] == [(255, 255, 255), (1, 2, 3)]
    assert dataset.shuffle(seed=0).select([0])[0]["images"][0].mode == "RGB"
    assert list(dataset["prompt"]) == ["a", "b"]


def test_none_among_images_is_refused_with_its_row(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": "q", "images": cell} for cell in (["a.png"], None, [], [None], ["a.png", None])]
    with pytest.raises(ValueError, match="2 rows have None among their images.*: 3, 4"):
        load(write(tmp_path / "d.jsonl", rows), task="i2t")


def test_input_pictures_are_refused_for_image_generation(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": "p", "images": []}, {"prompt": "p", "images": ["a.png"]}]
    with pytest.raises(ValueError, match="1 rows have input images.*'t2i'.*: 1"):
        load(write(tmp_path / "d.jsonl", rows))
    assert load(write(tmp_path / "e.jsonl", rows[:1]))[0]["images"] == []


def test_columns_are_mapped_and_the_asked_one_wins(tmp_path):
    rows = [{"prompt": "old", "q": "new", "a": "B", "opts": ["x", "y"], "extra": 1}]
    dataset = load(
        write(tmp_path / "d.jsonl", rows), task="i2t", text_column="q", answer_column="a", choices_column="opts"
    )
    assert dataset[0] == {"prompt": "new", "answer": "B", "choices": ["x", "y"], "extra": 1, "images": []}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "promt"}, r"text_column is 'promt'.*columns found: prompt, answers; did you mean 'prompt'\?"),
        ({"answer_column": "gold", "task": "i2t"}, "answer_column is 'gold'.*columns found: prompt, answers"),
        ({"image_column": "picture", "task": "i2t"}, "image_column is 'picture'"),
        ({"choices_column": "options", "task": "i2t"}, "choices_column is 'options'"),
        ({"stage": "sft"}, "image_column is 'image'"),
        ({"stage": "sft", "task": "i2t"}, "completion is 'completion'"),
        ({"train_split": "trian"}, "dataset_train_split: trian.*Unknown split.*train"),
        ({"test_split": "test"}, "dataset_test_split: test.*Unknown split"),
        ({"task": "t2t"}, r"task is 't2t'; valid: t2i, i2t; did you mean 't2i'\?"),
        ({"streaming": True}, "streaming data sets are not supported"),
        ({"dataset_config": "main"}, "dataset_config is 'main'"),
    ],
)
def test_wrong_fields_are_named_with_what_is_there(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as error:
        load(write(tmp_path / "d.jsonl", [{"prompt": "p", "answers": "A"}]), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "dataset_name is '.*missing.jsonl'; there is no such file"),
        ("prompts.tx", r"Did you mean '.*prompts.txt'\?"),
        ("empty.txt", "the file is empty"),
        ("notes.md", "files of type .txt, .jsonl"),
        ("broken.jsonl", "cannot be loaded: JSON parse error"),
        ("blank.txt", "no rows"),
    ],
)
def test_unusable_files_are_named(tmp_path, name, message):
    for file, text in {"prompts.txt": "a", "empty.txt": "", "notes.md": "x", "blank.txt": "\n\n"}.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_no_data_set_name_is_refused():
    with pytest.raises(ValueError, match="dataset_name is missing"):
        load_dataset_splits("", task="t2i")


def test_blank_prompts_are_refused_with_their_rows(tmp_path):
    prompts = ["a", "", "   ", None, "\n", "x" * 10_000, "🦊", "قطة"]
    with pytest.raises(ValueError, match=r"4 rows have empty prompts; rows \(from 0\): 1, 2, 3, 4\."):
        load(write(tmp_path / "d.jsonl", [{"prompt": p} for p in prompts]))
    (tmp_path / "d.txt").write_text("a\n\nb\n")
    with pytest.raises(ValueError, match="1 rows have empty prompts.*: 1"):
        load(tmp_path / "d.txt")
    messages = [[{"role": "user", "content": "hi"}]]
    with pytest.raises(ValueError, match="not text.*: 0"):
        check_dataset(datasets.Dataset.from_dict({"prompt": messages}), "t2i")


def test_streams_are_refused_in_one_sentence():
    stream = datasets.Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="streaming data sets are not supported, because"):
        check_dataset(stream, "t2i")


def test_a_missing_picture_is_found_before_training(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="'b.png': there is no such file"):
        load(write(tmp_path / "d.jsonl", [{"prompt": "q", "images": ["b.png"]}]), task="i2t")
    (tmp_path / "half.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    rows = [{"prompt": "q", "images": [name]} for name in ("a.png", "half.png")]
    dataset = load(write(tmp_path / "e.jsonl", rows), task="i2t")
    with pytest.raises(ValueError, match="row 1: image '.*half.png' cannot be read"):
        check_images(dataset)


def test_supervised_rows_get_their_targets(tmp_path):
    Image.new("RGBA", (4, 4)).save(tmp_path / "a.png")
    t2i = load(write(tmp_path / "d.jsonl", [{"prompt": "p", "pic": "a.png"}]), stage="sft", image_column="pic")
    assert (t2i[0]["image"].mode, t2i[0]["reasoning"]) == ("RGB", "")
    i2t = load(write(tmp_path / "e.jsonl", [{"prompt": "q", "completion": "c"}]), stage="sft", task="i2t")
    assert i2t[0] == {"prompt": "q", "completion": "c", "images": [], "reasoning": ""}
    with pytest.raises(ValueError, match="no picture in 'image'.*: 1"):
        rows = [{"prompt": "p", "image": "a.png"}, {"prompt": "p", "image": None}]
        load(write(tmp_path / "f.jsonl", rows), stage="sft")


def test_script_arguments_name_the_data_set(tmp_path):
    (tmp_path / "p.txt").write_text("a\nb\n")
    fields = dict(dataset_name=str(tmp_path / "p.txt"), dataset_config=None, dataset_streaming=False)
    fields |= dict(dataset_train_split="train", dataset_test_split="train[:1]", text_column="prompt")
    fields |= dict(image_column=None, answer_column="answer", choices_column=None, max_image_pixels=None)
    fields |= dict(dataset_format=None, dataset_mixture=None, dataset_seed=0, bad_rows="error")
    arguments = SimpleNamespace(**fields)
    splits = load_training_dataset(arguments, "t2i")
    assert (len(splits["train"]), len(splits["test"])) == (2, 1)
    assert load_training_dataset(arguments, "t2i", with_test=False)["test"] is None


def test_the_embedded_world_is_a_data_set():
    splits = load_dataset_splits("tiny", task="t2i", test_split="validation")
    assert {"prompt", "demands"} <= set(splits["train"].column_names)
    assert not set(splits["train"]["prompt"]) & set(splits["test"]["prompt"])
    row = load_dataset_splits("tiny", task="i2t", train_split="test")["train"][0]
    assert row["images"][0].mode == "RGB" and row["answer"] in "ABCD"
    with pytest.raises(ValueError, match="dataset_train_split is 'tset'.*did you mean 'test'"):
        load("tiny", train_split="tset")


# ------------------------------------------------------------------------------------------------------------ mixtures


def text_file(path: Path, word: str, count: int) -> str:
    path.write_text("".join(f"{word} {i}\n" for i in range(count)))
    return str(path)


def mixture(*entries, task="t2i", key="train", **options):
    return load_dataset_splits(task=task, mixture=list(entries), **options)[key]


def test_a_mixture_has_the_shares_of_its_weights_and_every_row(tmp_path):
    a, b = text_file(tmp_path / "a.txt", "a", 600), text_file(tmp_path / "b.txt", "b", 100)
    prompts = list(mixture({"name": a, "weight": 3}, {"name": b, "weight": 1})["prompt"])
    assert 0.21 < sum(p.startswith("b") for p in prompts) / len(prompts) < 0.29
    assert len(set(prompts)) == 700  # no row is lost, and b starts again when it is used up
    assert 750 < len(prompts) < 900
    scaled = mixture({"name": a, "weight": 0.75}, {"name": b, "weight": "0.25"})
    assert list(scaled["prompt"]) == prompts  # weights are relative, and may be text in YAML


def test_the_order_of_a_mixture_depends_on_the_seed_alone(tmp_path):
    entries = [{"name": text_file(tmp_path / f"{word}.txt", word, 40)} for word in "ab"]
    once, again, other = (list(mixture(*entries, seed=seed)["prompt"]) for seed in (0, 0, 1))
    assert once == again != other
    assert [p for p in once[:20] if p.startswith("a")] == [f"a {i}" for i in range(len(once))][: sum(
        p.startswith("a") for p in once[:20])]  # each source in its own order  # fmt: skip


def test_rows_of_a_mixture_stay_whole_with_their_own_layout_and_pictures(tmp_path):
    for name, colour in (("one", (1, 1, 1)), ("two", (2, 2, 2))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), colour).save(tmp_path / name / "a.png")
    one = write(tmp_path / "one" / "d.jsonl", [{"q": f"one {i}", "images": ["a.png"], "answer": "A"} for i in range(5)])
    rows = [{"question": "two", "image": "a.png", "options": ["x", "y"], "answer": "y"}] * 5
    two = write(tmp_path / "two" / "d.jsonl", rows)
    text = write(tmp_path / "text.jsonl", [{"prompt": "none", "answer": "C"}] * 3)
    entries = [{"name": one, "text_column": "q"}, {"name": two, "format": "vqa"}, {"name": text}]
    seen = set()
    for row in mixture(*entries, task="i2t"):
        kind = row["prompt"].split()[0]
        seen.add((kind, row["answer"], *(pixel(image) for image in row["images"])))
        assert (row["choices"] is not None) == (kind == "two")
    assert seen == {("one", "A", (1, 1, 1)), ("two", "B", (2, 2, 2)), ("none", "C")}


def test_held_out_rows_of_a_mixture_follow_one_another(tmp_path):
    entries = [{"name": text_file(tmp_path / f"{word}.txt", word, 9), "weight": 5} for word in "abc"]
    entries[1]["test_split"] = None  # not part of the held-out rows
    held_out = mixture(*entries, key="test", test_split="train[:2]")
    assert list(held_out["prompt"]) == ["a 0", "a 1", "c 0", "c 1"]
    assert mixture(*entries, key="test") is None


def test_an_entry_may_be_for_one_task_of_a_supervised_run(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    drawn = write(tmp_path / "t2i.jsonl", [{"prompt": "p", "image": "a.png"}] * 2)
    asked = write(tmp_path / "i2t.jsonl", [{"question": "q", "options": ["x", "y"], "answer": "y"}] * 3)
    entries = [{"name": drawn, "task": "t2i"}, {"name": asked, "task": "i2t", "format": "vqa"}]
    assert len(mixture(*entries, stage="sft")) == 2
    assert list(mixture(*entries, task="i2t", stage="sft")["completion"]) == ["B"] * 3
    with pytest.raises(ValueError, match="dataset_mixture has no entry for task 't2i'"):
        mixture(entries[1])
    with pytest.raises(ValueError, match=r"dataset_mixture\[0\]: task is 't2j'; valid: t2i, i2t; did you mean 't2i'"):
        mixture({"name": drawn, "task": "t2j"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "x.txt", "wieght": 1}, r"dataset_mixture\[1\] has the unknown key 'wieght'.*did you mean 'weight'\?"),
        ({"weight": 1}, r"dataset_mixture\[1\] has no name"),
        ({"name": "x.txt", "weight": 0}, r"dataset_mixture\[1\] has weight 0; it must be a number above 0"),
        ({"name": "x.txt", "weight": "much"}, "has weight 'much'"),
        ("x.txt", r"dataset_mixture\[1\] is 'x.txt'; write a mapping"),
        ("{name: x}", r"dataset_mixture\[1\] is '\{name: x\}', which is not valid JSON"),
        ({"name": "missing.txt"}, "dataset_name is 'missing.txt'; there is no such file"),
        ({"name": "tiny", "format": "genevall"}, r"dataset_format is 'genevall'; valid: .*did you mean 'geneval'\?"),
        ({"name": "tiny", "format": "vqa"}, "dataset_format 'vqa' has rows for task 'i2t'; for 't2i': prompts,"),
    ],
)
def test_wrong_entries_of_a_mixture_are_named(tmp_path, entry, message):
    good = {"name": text_file(tmp_path / "a.txt", "a", 2)}
    with pytest.raises(ValueError, match=message):
        mixture(good, entry)


def test_a_mixture_beside_a_name_and_columns_of_two_types_are_refused(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"prompt": "a", "tag": 1}])
    b = write(tmp_path / "b.jsonl", [{"prompt": "b", "tag": "x"}])
    with pytest.raises(ValueError, match="dataset_name is 'tiny' and dataset_mixture is set too"):
        load_dataset_splits("tiny", task="t2i", mixture=[{"name": a}])
    with pytest.raises(ValueError, match=r"column 'tag' is Value\('string'\) in '.*b.jsonl', but another type"):
        mixture({"name": a}, {"name": b})


# ------------------------------------------------------------------------------------------------------- rows to skip


def test_bad_rows_are_skipped_whole_with_a_count(tmp_path, caplog):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"prompt": p, "images": ["a.png"]} for p in ("one", "", "two", " ")] + [
        {"prompt": "three", "images": [None]}
    ]
    dataset = load(write(tmp_path / "d.jsonl", rows), task="i2t", bad_rows="skip")
    assert list(dataset["prompt"]) == ["one", "two"]
    assert dataset[1]["images"][0].size == (4, 4)
    assert "2 rows have empty prompts; they are skipped" in caplog.text and "1 rows have None among" in caplog.text
    with pytest.raises(ValueError, match="none of the 1 rows can be trained on"):
        load(write(tmp_path / "e.jsonl", [{"prompt": " "}]), bad_rows="skip")
    with pytest.raises(ValueError, match=r"bad_rows is 'skp'.*did you mean 'skip'\?"):
        load(tmp_path / "d.jsonl", bad_rows="skp")
