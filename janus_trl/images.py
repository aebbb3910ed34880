"""One loader for every picture that enters: data set rows, rewards and logs all get plain RGB."""

import base64
import binascii
import io
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# What PIL raises on broken files, beside its guard against decompression bombs, which is kept as it is.
_PIL_ERRORS = (OSError, UnidentifiedImageError, SyntaxError, EOFError, ValueError, IndexError, struct.error, zlib.error)
_BITS_16 = 256  # 16-bit values over 8-bit values


def load_image(source: Any, name: str | None = None) -> Image.Image:
    """Read a picture from anywhere and return a new RGB picture, upright and opaque; `source` is left as it was.

    Transparency (of a palette too) is laid on white, 16-bit grey is scaled down by 256, EXIF orientation is applied, an
    animation gives its first frame, and CMYK and other modes go through PIL's conversion. Pictures keep their size.

    Args:
        source: PIL picture, path, file content as bytes, `{"bytes": ..., "path": ...}` (the form `datasets` stores), a
            base64 string or a `data:` URI.
        name: How errors call the picture; derived from `source` by default.

    Raises:
        ValueError: `source` is none of these, the file is missing, truncated or no picture, or the picture is larger
            than PIL's limit. The message names the source.
    """
    name = name or _describe(source)
    try:
        with _open(source, name) as image:
            if 0 in image.size:
                raise ValueError(f"size is {image.width}x{image.height}")
            return _to_rgb(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"image {name} is too large: {error} Scale it down, or raise max_image_pixels in the recipe "
            f"(PIL.Image.MAX_IMAGE_PIXELS is {Image.MAX_IMAGE_PIXELS}, and twice as many are read)."
        ) from error
    except _PIL_ERRORS as error:
        if isinstance(error, _SourceError):
            raise
        raise ValueError(f"image {name} cannot be read: {error}".rstrip(".") + ".") from error


def limit_image_size(pixels: int | None) -> None:
    """Refuse pictures with more pixels from now on, in the whole process; None leaves PIL's limit.

    Raises:
        ValueError: The number is not positive.
    """
    if pixels is not None:
        if pixels < 1:
            raise ValueError(f"max_image_pixels is {pixels}; give a number of pixels, or leave it unset.")
        Image.MAX_IMAGE_PIXELS = -(-pixels // 2)  # PIL warns above its limit, and refuses above twice the limit


class _SourceError(ValueError):
    """The source itself is wrong, and the message says how already."""


class _Borrowed:
    """A picture of the caller's: a copy is worked on, and the original is not closed."""

    def __init__(self, image: Image.Image):
        self._image = image

    def __enter__(self) -> Image.Image:
        return self._image.copy()

    def __exit__(self, *_: object) -> None:
        return None


def _open(source: Any, name: str) -> Any:
    """A context manager that yields the opened picture."""
    if isinstance(source, Image.Image):
        return _Borrowed(source)
    if isinstance(source, Mapping):
        content = source.get("bytes")
        source = content if content is not None else source.get("path")
    if isinstance(source, bytes | bytearray | memoryview):
        return Image.open(io.BytesIO(source))
    if isinstance(source, Path):
        return Image.open(_existing(str(source), name))
    if isinstance(source, str):
        return _open_text(source, name)
    raise _SourceError(
        f"image {name} is of type {type(source).__name__}; expected a PIL picture, a path, bytes, a mapping with "
        "'bytes' or 'path', or a base64 string."
    )


def _open_text(text: str, name: str) -> Image.Image:
    if text.startswith(("http://", "https://")):
        raise _SourceError(f"image {name} is a web address; download it first and give the path.")
    if text.startswith("data:"):
        return Image.open(io.BytesIO(_decode(text.partition(",")[2], name)))
    if os.path.isfile(os.path.expanduser(text)):
        return Image.open(os.path.expanduser(text))
    # The base64 alphabet holds "/" but not "."; pictures as base64 are longer than file names.
    if len(text) > 64 and "." not in text:
        return Image.open(io.BytesIO(_decode(text, name)))
    return Image.open(_existing(text, name))


def _existing(path: str, name: str) -> str:
    if not os.path.isfile(os.path.expanduser(path)):
        raise _SourceError(f"image {name}: there is no such file (working folder: {os.getcwd()}).")
    return os.path.expanduser(path)


def _decode(text: str, name: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _SourceError(f"image {name} is neither a file nor valid base64 ({error}).") from error


def _describe(source: Any) -> str:
    if isinstance(source, Image.Image):
        return getattr(source, "filename", "") or f"<{source.mode} {source.width}x{source.height}>"
    if isinstance(source, Mapping):
        return _describe(source.get("path") or source.get("bytes"))
    if isinstance(source, bytes | bytearray | memoryview):
        return f"<{len(source)} bytes>"
    text = str(source) if isinstance(source, str | Path) else repr(source)
    return repr(text if len(text) <= 120 else f"{text[:60]}... ({len(text)} characters)")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB."""
    if image.mode.startswith("I;16"):
        # convert("L") would clip everything above 255 to white.
        grey = np.asarray(image).astype(np.uint32) // _BITS_16
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        return _wide_to_rgb(np.asarray(image))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    rgb = image.convert("RGB")
    rgb.info = {}  # colour profile and transparency no longer describe these pixels
    return rgb


def _wide_to_rgb(values: np.ndarray) -> Image.Image:
    """32-bit grey, which has no fixed white: 16-bit if anything is above 255, and floats up to 1 count as 0 to 1."""
    values = np.nan_to_num(values.astype(np.float64))
    if values.max() > 255:
        values = values / _BITS_16
    elif values.max() <= 1 and not np.array_equal(values, values.round()):
        values = values * 255
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
