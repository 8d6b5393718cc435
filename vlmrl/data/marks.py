"""By which content rows, images and files are known again, without decoding anything."""

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

from vlmrl.data.columns import Keys, as_list, value_at
from vlmrl.data.conversations import read_conversation
from vlmrl.data.image_source import NOWHERE, Reach, locate
from vlmrl.data.rows import Rows
from vlmrl.errors import DataError

_BLOCK = 64 * 2**10
_WHOLE_BYTES = 256 * 2**20
"""A file of so many bytes is read in full, a larger one in `_NUM_BLOCKS` blocks from its first to its last. Many files
share these bytes, and from `_MANY` on the blocks: a dataset may lie in a thousand of them."""
_NUM_BLOCKS = 256
_MANY = 16
_ENDS = 2
"""Blocks that are read of an image file: its first and its last. With its size they tell pictures apart."""


class RowMark(NamedTuple):
    """Digests of a row, 16 hexadecimal digits each."""

    question: str
    label: str
    images: str
    """Of the images' content; of one behind a URL, of the URL."""


class Marked(NamedTuple):
    """Rows, and what is needed to mark them."""

    rows: Rows
    keys: Keys
    """The columns of question, label and images: `input_key`, `label_key`, `image_key`."""
    reach: Reach = NOWHERE
    """The files that its images may come from."""

    def mark(self, row: int) -> RowMark | None:
        """The marks of one row; None when it cannot be read."""
        with suppress(Exception):  # a damaged row may raise anything; it is dropped where prompts are made
            values = self.rows[row]
            question, inline = read_conversation(value_at(values, self.keys["input_key"]))
            images = inline or as_list(value_at(values, self.keys["image_key"]))
            return RowMark(
                _digest(_canonical(question)),
                _digest(_canonical(value_at(values, self.keys["label_key"]))),
                _digest(*(_of_image(image, self.reach) for image in images if image is not None)),
            )
        return None


class FileMark(NamedTuple):
    """By what a file is known again."""

    size: int
    digest: str
    is_whole: bool
    """All of it was read; otherwise blocks of it, and its time says the rest."""
    time_ns: int
    """Of its last change."""


def mark_file(path: Path, *, one_of: int = 1) -> FileMark | None:
    """The mark of one file, of a dataset that has so many; None when it cannot be read."""
    try:
        size, time_ns = path.stat().st_size, path.stat().st_mtime_ns
        is_whole = size <= _WHOLE_BYTES // one_of
        some = max(_ENDS, min(_NUM_BLOCKS, _NUM_BLOCKS * _MANY // one_of))
        return FileMark(size, _read_blocks(path, -(-size // _BLOCK) if is_whole else some), is_whole, time_ns)
    except OSError:
        return None


def _read_blocks(path: Path, count: int) -> str:
    """A digest of `count` blocks of a regular file, spread from its first to its last. OSError for what is none."""
    digest = hashlib.blake2b(digest_size=8)
    # Without O_NONBLOCK the opening of a pipe waits for somebody to write.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        last = max(0, status.st_size - 1) // _BLOCK
        for block in sorted({round(place) for place in np.linspace(0, last, num=max(1, min(count, last + 1)))}):
            digest.update(os.pread(handle, _BLOCK, block * _BLOCK))
    finally:
        os.close(handle)
    return digest.hexdigest()


def _of_image(image: Any, reach: Reach) -> bytes:
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
        with suppress(OSError, ValueError, RuntimeError, DataError):  # no file, no name of one, or out of reach
            path = locate(Path(text), reach)
            return f"{path.stat().st_size} {_read_blocks(path, _ENDS)}".encode()
    return text.encode(errors="backslashreplace")


def _canonical(value: Any) -> bytes:
    """The same bytes for the same content, in whichever order its keys stand."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_told)
    return text.encode(errors="backslashreplace")


def _told(value: object) -> object:
    """What JSON has no form for, in words that are the same in another process."""
    if isinstance(value, Image.Image | np.ndarray | bytes | bytearray | memoryview):
        return _digest(_of_image(value, NOWHERE))
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    # Without the place in memory.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _digest(*parts: bytes | bytearray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def spread(count: int, most: int) -> Sequence[int]:
    """At most `most` of the numbers below `count`, evenly from first to last, coarse before fine: whoever stops early
    has seen the whole width."""
    numbers = sorted({round(place) for place in np.linspace(0, count - 1, num=min(count, most))})
    order: dict[int, None] = {}
    step = 1 << max(0, len(numbers) - 1).bit_length()
    while step:
        order |= dict.fromkeys(range(0, len(numbers), step))
        step //= 2
    return [numbers[place] for place in order]
