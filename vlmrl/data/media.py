"""From whatever a dataset calls an image to the pixels that trainer and engine both see."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.decode import ROOM, check_pixels, open_header, upright_rgb
from vlmrl.data.image_source import NOWHERE, Reach, read
from vlmrl.errors import DataError
from vlmrl.types import Media, Pixels

if TYPE_CHECKING:
    from vlmrl.plugins import Processor

MAX_ASPECT_RATIO = 200
"""The Qwen-VL image processors, ours and vLLM's, refuse images longer than this."""


@dataclass(frozen=True, slots=True, eq=False)
class InlineMedia:
    """An image that carries its own pixels. See `vlmrl.types.Media`."""

    hash: str
    size: tuple[int, int]
    """(width, height)"""
    pixels: Pixels
    """[height, width, 3], already resized."""

    def fetch(self) -> Pixels:
        return self.pixels


@dataclass(frozen=True, slots=True)
class Blank:
    """A grey image that nobody has to store. See `vlmrl.types.Media`."""

    hash: str
    size: tuple[int, int]
    """(width, height)"""

    def fetch(self) -> Pixels:
        width, height = self.size
        return np.full((height, width, 3), 127, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Noise:
    """Random pixels, the same whenever they are asked for. See `vlmrl.types.Media`."""

    hash: str
    size: tuple[int, int]
    """(width, height)"""

    def fetch(self) -> Pixels:
        width, height = self.size
        return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Resized:
    """Another image, stretched to fill the place of one of this size. See `vlmrl.types.Media`."""

    hash: str
    size: tuple[int, int]
    """(width, height)"""
    source: Media

    def fetch(self) -> Pixels:
        image = Image.fromarray(self.source.fetch()).resize(self.size, Image.Resampling.BICUBIC)
        return np.ascontiguousarray(np.asarray(image, dtype=np.uint8))


class Bounds(NamedTuple):
    """The most that an image, and several that belong together, may take."""

    image_bytes: int
    """Of an image while it is encoded."""
    image_pixels: int
    total_pixels: int
    """Of all images of a row, or of a request."""

    @classmethod
    def of(cls, columns: Columns) -> Bounds:
        return cls(columns.max_image_mib * 2**20, columns.max_image_pixels, columns.max_row_pixels)


class TotalPixelsError(DataError):
    """Images that fit alone, but not together."""


class _Opened(NamedTuple):
    """An image whose size is known, and whose pixels are not decoded yet."""

    image: Image.Image
    name: str
    is_kept: bool
    """Somebody else holds it, too."""


def make_row_media(
    images: Sequence[Any], *, processor: Processor, columns: Columns, reach: Reach = NOWHERE
) -> tuple[InlineMedia, ...]:
    """Open, convert and resize the images of one row, one after another. The door for every image of a dataset.

    Each is of any form that `open_images` names; all stay within the bounds that `columns` sets, and within `reach`.

    Raises:
        DataError: one of them cannot be used.
    """
    opened = _open_all(images, reach, Bounds.of(columns))
    try:
        return tuple(_make_media(one, processor, columns.max_image_pixels) for one in opened)
    except TotalPixelsError as error:
        raise DataError(f"{error}: raise data.max_row_pixels") from error


def make_media(source: Any, *, processor: Processor, columns: Columns, reach: Reach = NOWHERE) -> InlineMedia:
    """The same for a single image. DataError when it cannot be used."""
    (media,) = make_row_media([source], processor=processor, columns=columns, reach=reach)
    return media


def open_images(sources: Iterable[Any], *, bounds: Bounds, reach: Reach = NOWHERE) -> Iterator[Image.Image]:
    """Any forms of images as upright RGB, each decoded when it is asked for.

    A source is a path (relative ones start from `reach.start`), a `data:`, `file:` or `http(s):` URL, base64 text,
    encoded bytes, a PIL image, a [height, width, 3] uint8 array, or Hugging Face's `{"bytes": ..., "path": ...}`.
    Transparency is laid on white, 16-bit grey is scaled to 8 bits, EXIF rotation is applied, of an animation the first
    frame is taken. Raises DataError for what is missing, out of reach, truncated, not an image, or out of bounds.
    """
    for opened in _open_all(sources, reach, bounds):
        with ROOM.hold(opened.image, bounds.image_pixels):
            rgb = upright_rgb(opened.image, opened.name, is_kept=opened.is_kept)
        yield rgb


def _open_all(sources: Iterable[Any], reach: Reach, bounds: Bounds) -> Iterator[_Opened]:
    total = 0
    for source in sources:
        opened = _open(source, reach, bounds)
        total += opened.image.width * opened.image.height
        if total > bounds.total_pixels:
            raise TotalPixelsError(f"the images have more than {bounds.total_pixels} pixels together")
        yield opened


def _open(source: Any, reach: Reach, bounds: Bounds) -> _Opened:
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if isinstance(source, Image.Image):
        check_pixels(source, "an image of the dataset", bounds.image_pixels)
        return _Opened(source, "an image of the dataset", is_kept=True)
    encoded = read(source, reach=reach, max_bytes=bounds.image_bytes)
    return _Opened(open_header(encoded, max_pixels=bounds.image_pixels), encoded.name, is_kept=False)


def _make_media(opened: _Opened, processor: Processor, max_pixels: int) -> InlineMedia:
    assert processor.resize_factor is not None, "the model takes no images"
    with ROOM.hold(opened.image, max_pixels):
        image = upright_rgb(opened.image, opened.name, is_kept=opened.is_kept)
        pixels = resize(
            image, factor=processor.resize_factor, min_pixels=processor.min_pixels, max_pixels=processor.max_pixels
        )
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(f"{processor.resize_settings}|{width}x{height}|".encode(), digest_size=16)
    digest.update(pixels.data)
    return InlineMedia(hash=digest.hexdigest(), size=(width, height), pixels=pixels)


def resize(image: Image.Image, *, factor: int, min_pixels: int, max_pixels: int) -> Pixels:
    """[height, width, 3] at the size `target_size` says, bicubic."""
    size = target_size(image.size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8))


def target_size(size: tuple[int, int], *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The (width, height) an image is resized to: multiples of `factor`, between the bounds, aspect ratio nearly kept.

    It is qwen-vl-utils' `smart_resize`, except where that leaves the bounds (very long images, or bounds that are close
    together). Then the nearest shape within them is taken, so that resizing a second time, which is what vLLM does,
    changes nothing. Raises DataError for an image longer than 200 times its width.
    """
    from qwen_vl_utils.vision_process import smart_resize

    width, height = size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise DataError(
            f"an image of {width}x{height} pixels is too long: the aspect ratio may be {MAX_ASPECT_RATIO} at most"
        )
    new_height, new_width = smart_resize(height, width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    if min_pixels <= new_height * new_width <= max_pixels and _is_short(new_height, new_width):
        return new_width, new_height
    rows, columns = _nearest_grid(height / width, -(-min_pixels // factor**2), max_pixels // factor**2)
    return columns * factor, rows * factor


def _nearest_grid(aspect: float, fewest: int, most: int) -> tuple[int, int]:
    """The (rows, columns) with `fewest` to `most` cells that come nearest to an aspect ratio of rows / columns."""
    candidates = []
    for rows in range(1, most + 1):
        wanted = rows / aspect
        low, high = -(-fewest // rows), most // rows
        if low > high:
            continue
        columns = min(max(round(wanted), low, 1), high)
        if _is_short(rows, columns):
            candidates.append((abs(math.log(columns / wanted)), rows, columns))
    if not candidates:
        raise DataError(f"no grid of {fewest} to {most} patches is within the aspect ratio that images may have")
    _, rows, columns = min(candidates)
    return rows, columns


def _is_short(height: int, width: int) -> bool:
    return max(height, width) <= MAX_ASPECT_RATIO * min(height, width)


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise DataError(f"an array of {array.dtype} {list(array.shape)} is no image: [height, width, 3] of uint8 is")
    return Image.fromarray(array)
