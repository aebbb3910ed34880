"""Size of a picture as JPEG: a reward without a model, to see a whole run learn (arXiv:2305.13301, section 5.1)."""

import io
from typing import Any


class JpegSize:
    """Kilobytes (1000 bytes) of each picture as JPEG: detailed pictures score high, or low with `smaller`.

    The quickest reward to try a set-up with: it rises within some tens of steps, and its end is known (noise, or one
    flat colour).

    Args:
        smaller: Reward small files: the value is minus the kilobytes.
        quality: JPEG quality from 1 to 95.

    Raises:
        ValueError: A quality outside of this range.
    """

    def __init__(self, smaller: bool = False, quality: int = 95):
        if not 1 <= quality <= 95:
            raise ValueError(f"reward 'jpeg_size': quality is {quality}; it must be from 1 to 95.")
        self._sign, self._quality = -1.0 if smaller else 1.0, quality

    def __call__(self, generated_images: list, **columns: Any) -> list[float]:
        """One value per RGB PIL picture, in kilobytes."""
        return [self._sign * self._kilobytes(image) for image in generated_images]

    def _kilobytes(self, image: Any) -> float:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=self._quality)
        return buffer.tell() / 1000
