"""Convert images of any form that datasets use to the pixels that trainer and engine both see."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.decode import PIXEL_BUDGET, check_pixels, open_header, upright_rgb
from vlmrl.data.image_source import NO_ACCESS, ImageAccess, read
from vlmrl.errors import DataError
from vlmrl.types import Media, Pixels
from vlmrl.video_size import Size, pixel_shape

if TYPE_CHECKING:
    from vlmrl.plugins import Processor

MAX_ASPECT_RATIO = 200
"""The Qwen-VL image processors, ours and vLLM's, refuse images with a larger aspect ratio."""


@dataclass(frozen=True, slots=True, eq=False)
class InlineMedia:
    """An image or a video with its pixels. See `vlmrl.types.Media`."""

    hash: str
    size: Size
    pixels: Pixels
    """Already resized."""

    def fetch(self) -> Pixels:
        return self.pixels


@dataclass(frozen=True, slots=True)
class Blank:
    """A grey image or video, made when it is fetched. See `vlmrl.types.Media`."""

    hash: str
    size: Size

    def fetch(self) -> Pixels:
        return np.full(pixel_shape(self.size), 127, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Noise:
    """Random pixels from a fixed seed. See `vlmrl.types.Media`."""

    hash: str
    size: Size

    def fetch(self) -> Pixels:
        return np.random.default_rng(0).integers(0, 256, pixel_shape(self.size), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Resized:
    """Another image or video, stretched to a given size and number of frames. See `vlmrl.types.Media`."""

    hash: str
    size: Size
    source: Media

    def fetch(self) -> Pixels:
        shape, pixels = pixel_shape(self.size), self.source.fetch()
        frames = pixels if pixels.ndim == 4 else pixels[None]
        num_frames, height, width = (1, *shape[:2]) if len(shape) == 3 else shape[:3]
        chosen = frames[np.linspace(0, len(frames) - 1, num_frames).round().astype(int)]
        resized = [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in chosen]
        return np.stack([np.asarray(frame, dtype=np.uint8) for frame in resized]).reshape(shape)


def sheet(pixels: Pixels, *, columns: int = 4, max_frames: int = 16, max_side: int = 256) -> Pixels:
    """Lay frames of a video side by side, in rows of `columns`, shrunk to `max_side`: [height, width, 3].

    An image stays as it is.
    """
    if pixels.ndim == 3:
        return pixels
    shown = pixels[np.unique(np.linspace(0, len(pixels) - 1, max_frames).round().astype(int))]
    shown = np.stack([_thumbnail(frame, max_side) for frame in shown])
    blank = np.zeros((-len(shown) % columns, *shown.shape[1:]), dtype=np.uint8)
    rows = np.concatenate([shown, blank]).reshape(-1, columns, *shown.shape[1:])
    return np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0)


def _thumbnail(frame: Pixels, max_side: int) -> Pixels:
    image = Image.fromarray(frame)
    image.thumbnail((max_side, max_side))
    return np.asarray(image)


class ImageLimits(NamedTuple):
    """Size limits of one image, and of all images of a row or request."""

    image_bytes: int
    """Encoded bytes of one image."""
    image_pixels: int
    """Pixels of one image."""
    total_pixels: int
    """Pixels of all images of a row or request."""

    @classmethod
    def of(cls, columns: Columns) -> ImageLimits:
        return cls(columns.max_image_mib * 2**20, columns.max_image_pixels, columns.max_row_pixels)


class TotalPixelsError(DataError):
    """The images exceed `total_pixels` together."""


class _Opened(NamedTuple):
    """An image whose header is read and whose pixels are not decoded yet."""

    image: Image.Image
    name: str
    keep_open: bool
    """The dataset owns the image: it must not be closed here."""


def make_row_media(
    images: Sequence[Any], *, processor: Processor, columns: Columns, access: ImageAccess = NO_ACCESS
) -> tuple[InlineMedia, ...]:
    """Open, convert and resize the images of one row. Every image of a dataset goes through this function.

    Images have any form listed in `open_images`, within the limits that `columns` sets and within `access`.

    Raises:
        DataError: an image cannot be used.
    """
    opened = _open_all(images, access, ImageLimits.of(columns))
    try:
        return tuple(_make_media(image, processor, columns.max_image_pixels) for image in opened)
    except TotalPixelsError as error:
        raise DataError(f"{error}: raise data.max_row_pixels") from error


def make_media(source: Any, *, processor: Processor, columns: Columns, access: ImageAccess = NO_ACCESS) -> InlineMedia:
    """Open, convert and resize a single image. Raises DataError when it cannot be used."""
    (media,) = make_row_media([source], processor=processor, columns=columns, access=access)
    return media


def open_images(
    sources: Iterable[Any], *, limits: ImageLimits, access: ImageAccess = NO_ACCESS
) -> Iterator[Image.Image]:
    """Yield images of any form as upright RGB, each decoded when the iterator reaches it.

    A source is a path (relative ones start from `access.start`), a `data:`, `file:` or `http(s):` URL, base64 text,
    encoded bytes, a PIL image, a [height, width, 3] uint8 array, or Hugging Face's `{"bytes": ..., "path": ...}`.
    Transparency is laid on white, 16-bit grey is scaled to 8 bits, EXIF rotation is applied, and the first frame of an
    animation is taken.

    Raises:
        DataError: an image is missing, not allowed by `access`, truncated, not an image, or above `limits`.
    """
    for opened in _open_all(sources, access, limits):
        with PIXEL_BUDGET.reserve(opened.image, limits.image_pixels):
            rgb = upright_rgb(opened.image, opened.name, keep_open=opened.keep_open)
        yield rgb


def _open_all(sources: Iterable[Any], access: ImageAccess, limits: ImageLimits) -> Iterator[_Opened]:
    total = 0
    for source in sources:
        opened = _open(source, access, limits)
        total += opened.image.width * opened.image.height
        if total > limits.total_pixels:
            raise TotalPixelsError(f"the images have more than {limits.total_pixels} pixels in total")
        yield opened


def _open(source: Any, access: ImageAccess, limits: ImageLimits) -> _Opened:
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if isinstance(source, Image.Image):
        check_pixels(source, "an image of the dataset", limits.image_pixels)
        return _Opened(source, "an image of the dataset", keep_open=True)
    encoded = read(source, access=access, max_bytes=limits.image_bytes)
    return _Opened(open_header(encoded, max_pixels=limits.image_pixels), encoded.name, keep_open=False)


def _make_media(opened: _Opened, processor: Processor, max_pixels: int) -> InlineMedia:
    assert processor.resize_factor is not None, "the model takes no images"
    with PIXEL_BUDGET.reserve(opened.image, max_pixels):
        image = upright_rgb(opened.image, opened.name, keep_open=opened.keep_open)
        pixels = resize(image, processor.target_size(image.size), processor.resample)
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(f"{processor.resize_settings}|{width}x{height}|".encode(), digest_size=16)
    digest.update(pixels.data)
    return InlineMedia(hash=digest.hexdigest(), size=(width, height), pixels=pixels)


def resize(image: Image.Image, size: tuple[int, int], resample: Image.Resampling) -> Pixels:
    """Resize to (width, height): [height, width, 3]."""
    if size != image.size:
        image = image.resize(size, resample)
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8))


def target_size(size: tuple[int, int], *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the (width, height) that an image is resized to: multiples of `factor` within the pixel bounds.

    This is qwen-vl-utils' `smart_resize`, except when its result violates the bounds (very long images, or bounds close
    together). Then the nearest shape within them is taken, so that vLLM's second resize changes nothing.

    Raises:
        DataError: the aspect ratio is above 200.
    """
    from qwen_vl_utils.vision_process import smart_resize

    width, height = size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise DataError(
            f"an image of {width}x{height} pixels is too elongated: the aspect ratio may be at most {MAX_ASPECT_RATIO}"
        )
    new_height, new_width = smart_resize(height, width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    if min_pixels <= new_height * new_width <= max_pixels and _is_within_aspect_ratio(new_height, new_width):
        return new_width, new_height
    rows, columns = _nearest_grid(height / width, -(-min_pixels // factor**2), max_pixels // factor**2)
    return columns * factor, rows * factor


def _nearest_grid(aspect: float, min_cells: int, max_cells: int) -> tuple[int, int]:
    """Return the (rows, columns) nearest to an aspect ratio of rows / columns, with a cell count in the bounds."""
    candidates = []
    for rows in range(1, max_cells + 1):
        ideal = rows / aspect
        low, high = -(-min_cells // rows), max_cells // rows
        if low > high:
            continue
        columns = min(max(round(ideal), low, 1), high)
        if _is_within_aspect_ratio(rows, columns):
            candidates.append((abs(math.log(columns / ideal)), rows, columns))
    if not candidates:
        raise DataError(
            f"no grid of {min_cells} to {max_cells} patches has an aspect ratio of at most {MAX_ASPECT_RATIO}"
        )
    _, rows, columns = min(candidates)
    return rows, columns


def _is_within_aspect_ratio(height: int, width: int) -> bool:
    return max(height, width) <= MAX_ASPECT_RATIO * min(height, width)


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise DataError(
            f"an array of {array.dtype} {list(array.shape)} is not an image: give [height, width, 3] of uint8"
        )
    return Image.fromarray(array)
