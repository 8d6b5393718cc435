"""Digests of rows, images, videos and files, computed without decoding any image."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vlmrl.config.pairs import PAIR_KEYS
from vlmrl.data.columns import Keys, as_list, top_column, value_at
from vlmrl.data.conversations import ends_with_answer, is_conversation, read_conversation
from vlmrl.data.image_source import NO_ACCESS, ImageAccess, locate
from vlmrl.data.pair_rows import read_side
from vlmrl.data.row_media import as_videos
from vlmrl.data.rows import Rows
from vlmrl.data.video_media import VideoSource, parse_video
from vlmrl.errors import DataError

_BLOCK = 64 * 2**10
_WHOLE_BYTES = 256 * 2**20
"""Files up to this size are read in full, larger ones in `_NUM_BLOCKS` evenly spaced blocks. The size is divided among
the files of a dataset, which may have a thousand, and the blocks are divided from `_NUM_UNREDUCED_FILES` files on."""
_NUM_BLOCKS = 256
_NUM_UNREDUCED_FILES = 16
_NUM_IMAGE_BLOCKS = 2
"""Blocks read of an image file, its first and its last; together with the file size they distinguish images."""


class RowDigest(NamedTuple):
    """Digests of a row, 16 hexadecimal digits each."""

    question: str
    """With both responses, if the row has a chosen and a rejected one."""
    label: str
    images: str
    """Of the content of images and videos; for one behind a URL, of the URL."""
    response: str
    """Of the response to learn, if the run reads one."""
    others: str
    """Of the columns that none of these are in: reward functions read them, and `vlmrl generate` keeps them."""


class RowHasher(NamedTuple):
    """Computes the digests of a dataset's rows."""

    rows: Rows
    keys: Keys
    """The columns of question, label, images, videos and response: `input_key`, ..."""
    access: ImageAccess = NO_ACCESS
    """The files that the images may come from."""

    def digest(self, row: int) -> RowDigest | None:
        """Return the digests of one row; None when it cannot be read."""
        with suppress(Exception):  # a damaged row may raise anything; it is dropped and reported when it is drawn
            values = self.rows[row]
            question, inline = read_conversation(value_at(values, self.keys["input_key"]))
            images = inline or _of_columns(values, self.keys)
            pair = [value_at(values, self.keys[name]) for name in PAIR_KEYS if name in self.keys]
            read = {top_column(key) for key in self.keys.values()}
            others = {str(name): value for name, value in values.items() if name not in read}
            return RowDigest(
                _digest(*map(_canonical, [question, *pair])),
                _digest(_canonical(value_at(values, self.keys.get("label_key")))),
                _digest(*(_image_content(image, self.access) for image in images if image is not None)),
                _digest(_canonical(value_at(values, self.keys.get("output_key")))),
                _digest(_canonical(others)),
            )
        return None

    def prompt(self, row: int) -> str | None:
        """Return the digest of what a row asks: its question, without any response, and the images with it; of a
        generated row that of its key. None when it cannot be read."""
        with suppress(Exception):  # as above
            if (key := self.rows.question_key(row)) is not None:
                return _digest(_canonical(key))
            values = self.rows[row]
            question, images = _prompt(values, self.keys)
            images = images or _of_columns(values, self.keys)
            contents = (_image_content(image, self.access) for image in images if image is not None)
            return _digest(_canonical(question), *contents)
        return None


class FileDigest(NamedTuple):
    """Size and content of a file."""

    size: int
    digest: str
    is_whole: bool
    """Whether the digest covers the whole file; otherwise it covers blocks, and the time shows other changes."""
    time_ns: int
    """Time of the last modification."""


def digest_file(path: Path, *, num_files: int = 1) -> FileDigest | None:
    """Return the digest of one of a dataset's `num_files` files; None when it cannot be read."""
    try:
        size, time_ns = path.stat().st_size, path.stat().st_mtime_ns
        is_whole = size <= _WHOLE_BYTES // num_files
        share = max(_NUM_IMAGE_BLOCKS, min(_NUM_BLOCKS, _NUM_BLOCKS * _NUM_UNREDUCED_FILES // num_files))
        digest = _digest_blocks(path, -(-size // _BLOCK) if is_whole else share)
        return FileDigest(size, digest, is_whole, time_ns)
    except OSError:
        return None


def _digest_blocks(path: Path, count: int) -> str:
    """Digest `count` evenly spaced blocks, from the first to the last. Raises OSError unless it is a regular file."""
    digest = hashlib.blake2b(digest_size=8)
    # Without O_NONBLOCK opening a FIFO waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        last = max(0, status.st_size - 1) // _BLOCK
        for block in sorted({round(position) for position in np.linspace(0, last, num=max(1, min(count, last + 1)))}):
            digest.update(os.pread(handle, _BLOCK, block * _BLOCK))
    finally:
        os.close(handle)
    return digest.hexdigest()


def _prompt(values: Mapping[str, Any], keys: Keys) -> tuple[Any, Sequence[Any]]:
    """Return the question of a row and the images inside its messages. Of a pair it is that of the chosen response."""
    if "chosen_key" in keys:
        side = read_side(values, keys, "chosen_key")
        question, images = side.question, side.images
    else:
        question, images = read_conversation(value_at(values, keys["input_key"]))
        if ends_with_answer(question):
            question = question[:-1]
    # A text and a conversation of this one message ask the same.
    if is_conversation(question) and len(question) == 1 and question[0].get("role") == "user":
        question = question[0].get("content")
    return question, images


def _of_columns(values: Mapping[str, Any], keys: Keys) -> list[Any]:
    """Return the images of a row's column, then its videos."""
    videos = as_videos(value_at(values, keys.get("video_key")))
    return [*as_list(value_at(values, keys["image_key"])), *map(parse_video, videos)]


def _image_content(image: Any, access: ImageAccess) -> bytes:
    if isinstance(image, VideoSource):
        contents = [_image_content(frame, access) for frame in (image.frames or [image.source])]
        return _digest(*contents, repr((image.sample_fps, image.start, image.end)).encode()).encode()
    if isinstance(image, Mapping):
        content = image.get("bytes")
        image = image.get("path") if content is None else content
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Image.Image):
        return f"{image.mode} {image.size} ".encode() + image.tobytes()
    if isinstance(image, np.ndarray):
        return f"{image.dtype} {image.shape} ".encode() + image.tobytes()
    text = str(image)
    if isinstance(image, str | Path) and len(text) < 4096 and "://" not in text:
        with suppress(OSError, ValueError, RuntimeError, DataError):  # not a file, not a valid name, or not allowed
            path = locate(Path(text), access)
            return f"{path.stat().st_size} {_digest_blocks(path, _NUM_IMAGE_BLOCKS)}".encode()
    return text.encode(errors="backslashreplace")


def _canonical(value: Any) -> bytes:
    """Serialise a value so that equal content gives equal bytes, regardless of the order of keys."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_json_fallback)
    return text.encode(errors="backslashreplace")


def _json_fallback(value: object) -> object:
    """Represent a value that JSON cannot, in the same way in every process."""
    if isinstance(value, Image.Image | np.ndarray | bytes | bytearray | memoryview):
        return _digest(_image_content(value, NO_ACCESS))
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    # Without the address in memory, which differs between processes.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _digest(*parts: bytes | bytearray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def spaced_indices(count: int, limit: int) -> Sequence[int]:
    """Return up to `limit` evenly spaced indices below `count`, coarse before fine: any prefix covers the range."""
    numbers = sorted({round(position) for position in np.linspace(0, count - 1, num=min(count, limit))})
    order: dict[int, None] = {}
    step = 1 << max(0, len(numbers) - 1).bit_length()
    while step:
        order |= dict.fromkeys(range(0, len(numbers), step))
        step //= 2
    return [numbers[position] for position in order]
