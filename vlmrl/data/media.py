"""From whatever a dataset calls an image to the pixels that trainer and engine both see."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from vlmrl.config.data import Columns
from vlmrl.errors import DataError
from vlmrl.types import Media, Pixels

if TYPE_CHECKING:
    from vlmrl.plugins import Processor

MAX_ASPECT_RATIO = 200
"""The Qwen-VL image processors, ours and vLLM's, refuse images longer than this."""

_DOWNLOAD_TIMEOUT_S = 30
_MAX_DOWNLOAD_BYTES = 256 * 2**20
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")


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


def make_media(source: Any, *, processor: Processor, columns: Columns, root: Path | None) -> InlineMedia:
    """Open, convert and resize one image of a row. DataError when it cannot be used."""
    assert processor.resize_factor is not None, "the model takes no images"
    image = open_image(source, root=root, max_image_pixels=columns.max_image_pixels)
    pixels = resize(
        image, factor=processor.resize_factor, min_pixels=processor.min_pixels, max_pixels=processor.max_pixels
    )
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(f"{processor.resize_settings}|{width}x{height}|".encode(), digest_size=16)
    digest.update(pixels.data)
    return InlineMedia(hash=digest.hexdigest(), size=(width, height), pixels=pixels)


def open_image(source: Any, *, root: Path | None, max_image_pixels: int) -> Image.Image:
    """Any form of an image as upright RGB.

    `source` is a path (relative ones start from `root`), a `data:`, `file:` or `http(s):` URL, base64 text, encoded
    bytes, a PIL image, a [height, width, 3] uint8 array, or Hugging Face's `{"bytes": ..., "path": ...}`.
    Transparency is laid on white, 16-bit grey is scaled to 8 bits, EXIF rotation is applied, of an animation the first
    frame is taken. Raises DataError for what is missing, truncated, not an image, or has more than
    `max_image_pixels` pixels.
    """
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if isinstance(source, Image.Image):
        return _decode(source, "an image of the dataset", max_image_pixels)
    content, name = _read(source, root)
    if max_image_pixels > (Image.MAX_IMAGE_PIXELS or max_image_pixels):
        # Pillow's own bound is global: it is only ever raised, and only as far as the user asked.
        Image.MAX_IMAGE_PIXELS = max_image_pixels
    try:
        image = Image.open(io.BytesIO(content))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(_bomb(name, max_image_pixels)) from error
    except Exception as error:  # decoders raise nearly anything on bytes that are no image
        raise DataError(f"{name} is not an image that Pillow can read ({len(content)} bytes)") from error
    return _decode(image, name, max_image_pixels)


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


def _read(source: Any, root: Path | None) -> tuple[bytes, str]:
    """The encoded bytes of an image, and what to call it in a message."""
    if isinstance(source, Mapping):
        content, path = source.get("bytes"), source.get("path")
        if content is None and path is None:
            raise DataError(f"an image has neither bytes nor path, only: {', '.join(map(str, source)) or 'nothing'}")
        source = path if content is None else content
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), f"an image of {len(source)} bytes"
    if isinstance(source, Path):
        return _read_file(source, root)
    if not isinstance(source, str):
        raise DataError(
            f"{type(source).__name__} is no form of an image: give a path, URL, base64 text, bytes or PIL image"
        )
    if source.startswith("data:"):
        return _decode_base64(source.partition(",")[2], "the image in a data URL"), "the image in a data URL"
    if source.startswith(("http://", "https://")):
        return _download(source)
    if source.startswith("file://"):
        return _read_file(Path(source.removeprefix("file://")), root)
    if len(source) > 255 and _BASE64.fullmatch("".join(source.split())):
        return _decode_base64(source, "an image in base64"), "an image in base64"
    path = Path(source)
    if not _exists(_under(root, path)) and _BASE64.fullmatch(source):
        return _decode_base64(source, "an image in base64"), "an image in base64"
    return _read_file(path, root)


def _read_file(path: Path, root: Path | None) -> tuple[bytes, str]:
    full = _under(root, path)
    try:
        return full.read_bytes(), f"image {full}"
    except FileNotFoundError as error:
        raise DataError(f"image file {full} does not exist") from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"image file {_short(str(full))} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _under(root: Path | None, path: Path) -> Path:
    path = path.expanduser()
    return path if root is None or path.is_absolute() else root / path


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # base64 text can be too long for, or hold what is not allowed in, a file name
        return False


def _decode_base64(text: str, name: str) -> bytes:
    compact = "".join(text.split()).replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except binascii.Error as error:
        raise DataError(f"{name} is not valid base64") from error


def _download(url: str) -> tuple[bytes, str]:
    name = f"image {_short(url)}"
    try:
        with urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT_S) as answer:
            content = answer.read(_MAX_DOWNLOAD_BYTES + 1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise DataError(f"{name} cannot be downloaded: {error}") from error
    if len(content) > _MAX_DOWNLOAD_BYTES:
        raise DataError(f"{name} is larger than {_MAX_DOWNLOAD_BYTES // 2**20} MiB")
    return content, name


def _decode(image: Image.Image, name: str, max_image_pixels: int) -> Image.Image:
    width, height = image.size
    if width * height > max_image_pixels:
        raise DataError(_bomb(f"{name} ({width}x{height})", max_image_pixels))
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        return _to_rgb(upright)
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise DataError(f"{name} is damaged or truncated: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith(("I", "F")):
        return _from_deep_grey(image).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits, scaled: Pillow's own conversion would clip everything above 255 to white."""
    values = np.asarray(image, dtype=np.float64)
    top = float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and top > 255):
        values = values / 257
    elif image.mode == "F" and top <= 1:
        values = values * 255
    return Image.fromarray(np.clip(values.round(), 0, 255).astype(np.uint8))


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise DataError(f"an array of {array.dtype} {list(array.shape)} is no image: [height, width, 3] of uint8 is")
    return Image.fromarray(array)


def _bomb(name: str, bound: int) -> str:
    return f"{name} has more than {bound} pixels: a decompression bomb, or raise data.max_image_pixels"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
