"""Decode images to upright RGB in memory bounded by their number of pixels."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from vlmrl.data.image_source import Encoded
from vlmrl.errors import DataError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow reads forty more formats, mostly with rarely reviewed code."""

_BLOCK = 1024
"""Side in pixels of the squares in which an image is converted."""
_MAX_TILE_PIXELS = 4096 * 4096
"""Most pixels of a TIFF tile: libtiff decodes whole tiles, however small the image is."""
_MAX_SCANS = 100
"""Most scans of a progressive JPEG. Each passes over the whole image; ten are usual. libtiff has the same limit."""
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_MEMORY_FACTORS = {"WEBP": 2}
"""Formats whose decoder needs this multiple of the image's memory."""
_TRANSPOSE_BY_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Operation that undoes each EXIF orientation."""


class PixelBudget:
    """Bound on the pixels that all threads decode at once: many small images, or one of the largest."""

    def __init__(self) -> None:
        self._num_pixels = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, image: Image.Image, max_pixels: int) -> Iterator[None]:
        """Wait until the image fits within `max_pixels`, or no other image is being decoded."""
        with self.reserve_pixels(image.width * image.height * _MEMORY_FACTORS.get(image.format or "", 1), max_pixels):
            yield

    @contextmanager
    def reserve_pixels(self, num_pixels: int, max_pixels: int) -> Iterator[None]:
        """Wait until so many pixels fit, as `reserve` does. A thread that holds a reservation must not make another."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_pixels or self._num_pixels + num_pixels <= max_pixels)
            self._num_pixels += num_pixels
        try:
            yield
        finally:
            with self._changed:
                self._num_pixels -= num_pixels
                self._changed.notify_all()


PIXEL_BUDGET = PixelBudget()
"""The budget of this process."""


def open_header(encoded: Encoded, *, max_pixels: int) -> Image.Image:
    """Open an image without decoding its pixels.

    Raises:
        DataError: its format is not in `FORMATS`, it has more than `max_pixels` pixels, or decoding it would take much
            more memory or time than that number of pixels needs.
    """
    content, name = encoded
    if max_pixels > (Image.MAX_IMAGE_PIXELS or max_pixels):
        # Pillow's own limit is global, so it is only raised, and only up to the configured one.
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(_bomb(name, max_pixels)) from error
    except Exception as error:  # decoders raise nearly anything on bytes that are no image
        raise DataError(
            f"{name} is not a readable image ({len(content)} bytes): supported are {', '.join(FORMATS)}"
        ) from error
    check_pixels(image, name, max_pixels)
    if image.format == "TIFF":
        _check_tiles(image, name)
    if image.format in ("JPEG", "MPO") and num_scans(content) > _MAX_SCANS:
        raise DataError(f"{name} is a JPEG of more than {_MAX_SCANS} scans: it would take minutes to decode")
    return image


def check_pixels(image: Image.Image, name: str, max_pixels: int) -> None:
    """Raise DataError for an image of more than `max_pixels` pixels."""
    check_size(image.size, name, max_pixels)


def check_size(size: tuple[int, int], name: str, max_pixels: int) -> None:
    """Raise DataError for a (width, height) of more than `max_pixels` pixels."""
    width, height = size
    if width * height > max_pixels:
        raise DataError(_bomb(f"{name} ({width}x{height})", max_pixels))


def upright_rgb(image: Image.Image, name: str, *, keep_open: bool) -> Image.Image:
    """Return the first frame with EXIF rotation applied and transparency on white.

    Unless `keep_open`, the image is closed as soon as its pixels are no longer needed.

    Raises:
        DataError: the image is damaged or truncated.
    """
    try:
        image.load()
        transpose = _TRANSPOSE_BY_ORIENTATION.get(image.getexif().get(ExifTags.Base.Orientation, 1))
        rgb = _to_rgb(image)
        if rgb is not image and not keep_open:
            image.close()
        return rgb if transpose is None else rgb.transpose(transpose)
    except DataError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise DataError(f"{name} is damaged or truncated: {error}") from error


def num_scans(jpeg: bytes) -> int:
    """Count the scans of a JPEG file's first image."""
    position, count = 2, 0
    while match := _JPEG_MARKER.search(jpeg, position):
        marker, position = jpeg[match.start() + 1], match.end()
        if marker == 0xD9:  # end of image; further images may follow
            break
        if marker == 0xDA:
            count += 1
        if marker != 0xD8 and marker != 0x01:  # all others have a payload, which might contain marker bytes
            position += max(int.from_bytes(jpeg[position : position + 2], "big"), 2)
    return count


def _check_tiles(image: Image.Image, name: str) -> None:
    tags = image.tag_v2  # type: ignore[attr-defined]
    width, height = tags.get(322, 1), tags.get(323, 1)
    bound = max(_MAX_TILE_PIXELS, image.width * image.height)
    if not isinstance(width, int) or not isinstance(height, int) or width * height > bound:
        raise DataError(
            f"{name} has {image.width}x{image.height} pixels in tiles of {width}x{height}: a decompression bomb"
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    divisor = _divisor(image) if image.mode.startswith(("I", "F")) else None
    rgb = Image.new("RGB", image.size)
    for box in _blocks(image):
        block = image.crop(box)
        rgb.paste(_block_to_rgb(block) if divisor is None else _from_deep_grey(block, divisor), box)
    return rgb


def _block_to_rgb(block: Image.Image) -> Image.Image:
    if not block.has_transparency_data:
        return block.convert("RGB")
    rgba = block.convert("RGBA")
    white = Image.new("RGB", rgba.size, (255, 255, 255))
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _divisor(image: Image.Image) -> float:
    """Return the divisor that scales deep grey to 8 bits.

    Integers above 255 are 16-bit. Floats are taken as 0 to 1, else as 8-bit, else as 16-bit; both of the first ranges
    may be exceeded a little, as resampling does.
    """
    if image.mode.startswith("I;16"):
        return 257.0
    top = -np.inf
    for box in _blocks(image):
        values = _values(image.crop(box))
        if not np.isfinite(values).all():
            raise DataError("an image holds NaN or infinite values")
        top = max(top, float(values.max()))
    if image.mode == "F" and top <= 2:
        return 1 / 255
    return 1.0 if top <= (510 if image.mode == "F" else 255) else 257.0


def _from_deep_grey(block: Image.Image, divisor: float) -> Image.Image:
    """Scale deep grey to 8 bits: Pillow's own conversion clips everything above 255 to white."""
    values = (_values(block) / divisor).round()
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")


def _values(block: Image.Image) -> NDArray[np.float64]:
    return np.asarray(block, dtype=np.float64)


def _blocks(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Yield (left, top, right, bottom) of squares that cover the image."""
    for top in range(0, image.height, _BLOCK):
        for left in range(0, image.width, _BLOCK):
            yield left, top, min(left + _BLOCK, image.width), min(top + _BLOCK, image.height)


def _bomb(name: str, bound: int) -> str:
    return f"{name} has more than {bound} pixels: it may be a decompression bomb; if not, raise data.max_image_pixels"
