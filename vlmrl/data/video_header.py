"""Checks of a video file's bytes before FFmpeg opens it: its container, whether it is whole, how many frames it has."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from vlmrl.data.image_source import Encoded
from vlmrl.errors import DataError

FORMATS = ("MP4", "MOV", "WebM", "Matroska", "AVI", "GIF")
"""FFmpeg reads hundreds of formats, among them playlists that name other files and addresses."""

Demuxer = Literal["mov", "matroska", "avi", "gif"]

_BOXES = frozenset((b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"))
"""Boxes of an MP4 file that hold boxes."""
_MAX_DEPTH = 8
_MAX_BOXES = 2_000_000
"""Each frame of a stream may have its own fragment, of eight boxes."""
_SEGMENT = 0x18538067
"""Id of the Matroska element that holds nearly all of a file."""


def find_demuxer(encoded: Encoded) -> Demuxer:
    """Return FFmpeg's name of the container, by the first bytes: a file never chooses another.

    Raises:
        DataError: it is none of `FORMATS`.
    """
    content, name = encoded
    if content[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if content[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "avi"
    if content[:4] == b"GIF8":
        return "gif"
    raise DataError(f"{name} is not a readable video ({len(content)} bytes): supported are {', '.join(FORMATS)}")


def check_whole(encoded: Encoded, demuxer: Demuxer) -> None:
    """Raise DataError for a WebM, Matroska or GIF file whose end is missing, which FFmpeg would read without a word."""
    content, name = encoded
    if demuxer == "matroska":
        length = _matroska_length(content)
        if length is not None and length > len(content):
            raise DataError(f"{name} is truncated: it has {len(content)} of {length} bytes")
    if demuxer == "gif" and not content.rstrip(b"\0").endswith(b";"):
        raise DataError(f"{name} is truncated: a GIF ends with a trailer, which it lacks")


def num_samples(encoded: Encoded, demuxer: Demuxer) -> int:
    """Return how many packets an MP4 or MOV file says that it has, of uncompressed sound none; 0 for other files.

    FFmpeg allocates 35 bytes for each when it opens the file, however short the file is.

    Raises:
        DataError: its index is compressed, or it has millions of boxes.
    """
    if demuxer != "mov":
        return 0
    total = 0
    is_sound = is_raw_sound = False
    for number, (box, start, end) in enumerate(_boxes(encoded.content, 0, len(encoded.content))):
        if number > _MAX_BOXES:
            raise DataError(f"{encoded.name} has more than {_MAX_BOXES} boxes: write it anew")
        words = struct.unpack_from(f">{min(5, (end - start) // 4)}I", encoded.content, start)
        if box == b"cmov":
            raise DataError(f"{encoded.name} has a compressed index, as old QuickTime files: write it anew")
        if box == b"trak":
            is_sound = is_raw_sound = False
        elif box == b"hdlr" and len(words) > 2:
            is_sound = words[2] == int.from_bytes(b"soun", "big")
        elif box == b"stts" and len(words) > 3:  # precedes the sizes
            is_raw_sound = is_sound and words[1] == 1 and words[3] == 1
        elif box == b"stsz" and len(words) > 2 and not is_raw_sound:
            total += words[2]
        elif box == b"trun" and len(words) > 1:
            total += words[1]
    return total


class _Box(NamedTuple):
    kind: bytes
    start: int
    """Of its content."""
    end: int


def _boxes(content: bytes, start: int, end: int, depth: int = 0) -> Iterator[_Box]:
    """Yield the boxes of an MP4 file, those that hold boxes before what they hold."""
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", content, start)
        header = 8
        if size == 1 and start + 16 <= end:
            (size,) = struct.unpack_from(">Q", content, start + 8)
            header = 16
        stop = end if size == 0 else min(start + size, end)
        if stop < start + header:
            return
        yield _Box(kind, start + header, stop)
        if kind in _BOXES and depth < _MAX_DEPTH:
            yield from _boxes(content, start + header, stop, depth + 1)
        start = stop


def _matroska_length(content: bytes) -> int | None:
    """Return the number of bytes that a Matroska file has by its header; None if it does not say, as in recordings."""
    at = 0
    while at < min(len(content), 2**16):
        element, at = _number(content, at, with_marker=True)
        size, at = _number(content, at, with_marker=False)
        if element is None or size is None:
            return None
        at += size
        if element == _SEGMENT:
            return at
    return None


def _number(content: bytes, at: int, *, with_marker: bool) -> tuple[int | None, int]:
    """Read a number of EBML (RFC 8794), and where it ends; None if all its bits are set (unknown), or it is cut off."""
    first = content[at] if at < len(content) else 0
    length = 9 - first.bit_length()
    value = int.from_bytes(content[at : at + length], "big")
    if not first or at + length > len(content):
        return None, len(content)
    if with_marker:
        return value, at + length
    mask = (1 << 7 * length) - 1
    return (None if value & mask == mask else value & mask), at + length
