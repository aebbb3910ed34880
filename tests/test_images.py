"""Loading pictures: every kind and mode becomes RGB, and what cannot be one is refused."""

import base64
import io
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from janus_trl.data import load_image, load_training_dataset
from janus_trl.data_rows import with_reader_settings
from janus_trl.images import limit_image_size
from janus_trl.script_arguments import JanusScriptArguments
from tests.data_files import pixel, write

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real prompts and pictures is absent")


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


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


def test_workers_that_are_not_forked_have_the_limit_of_the_recipe(tmp_path, monkeypatch):
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    name = write(tmp_path / "d.jsonl", [{"prompt": "q", "images": ["a.png"]}])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    rows = load_training_dataset(JanusScriptArguments(dataset_name=name, max_image_pixels=200), "i2t")["train"]
    sent = pickle.dumps(with_reader_settings(rows, forgiving=True))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # a new process has PIL's own
    assert pickle.loads(sent)[0]["images"][0].size == (20, 10)  # a blank one would have another size


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
