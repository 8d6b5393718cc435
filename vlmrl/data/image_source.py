"""The encoded bytes of an image, from the places that a dataset may name: the row itself, its folders, and the web."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from vlmrl.config.data import Columns
from vlmrl.data.download import download
from vlmrl.errors import ConfigError, DataError

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
_FILE_URL = re.compile(r"file://", re.IGNORECASE)
_WEB_URL = re.compile(r"https?://", re.IGNORECASE)
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without blocking: nobody need ever write to a FIFO."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The files and addresses that the images of a dataset may come from. By default there are none: an image has to
    bring its own bytes."""

    start: Path | None = None
    """Where relative paths start; None: no file may be read."""
    folders: tuple[Path, ...] = ()
    """Files lie below one of these, once symbolic links are followed."""
    allow_urls: bool = False
    """Images may be downloaded from public addresses."""

    @classmethod
    def of(cls, root: Path | None, columns: Columns, also: Sequence[Path] = ()) -> Reach:
        """The reach of a dataset in the folder `root` (None: the working directory) with images in the folders `also`,
        too.

        Raises:
            ConfigError: one of `data.image_roots` is no folder.
        """
        own = Path() if root is None else root
        start = own if columns.image_root is None else Path(columns.image_root).expanduser()
        named = [Path(folder).expanduser() for folder in columns.image_roots]
        if missing := [folder for folder in named if not folder.is_dir()]:
            raise ConfigError(f"data.image_roots: {missing[0]} is no folder")
        folders = (start, *([] if root is None else [root]), *named, *also)
        return cls(start, tuple(Path(os.path.realpath(folder)) for folder in folders), columns.allow_image_urls)


NOWHERE = Reach()
"""For images that come with a request."""


class Encoded(NamedTuple):
    """An image that is still to be decoded."""

    content: bytes
    name: str
    """What to call it in a message."""


def read(source: Any, *, reach: Reach, max_bytes: int) -> Encoded:
    """The bytes of an image.

    A source is bytes, base64 text, a `data:`, `file:` or `http(s):` URL, a path, or Hugging Face's
    `{"bytes": ..., "path": ...}`.

    Raises:
        DataError: it is of no such form, is missing, has more than `max_bytes` bytes, or is out of `reach`.
    """
    if isinstance(source, Mapping):
        content, path = source.get("bytes"), source.get("path")
        if content is None and path is None:
            raise DataError(f"an image has neither bytes nor path, only: {', '.join(map(str, source)) or 'nothing'}")
        source = path if content is None else content
    if isinstance(source, bytes | bytearray | memoryview):
        _check_size(len(source), f"an image of {len(source)} bytes", max_bytes)
        return Encoded(bytes(source), f"an image of {len(source)} bytes")
    if isinstance(source, Path):
        return _read_file(source, reach, max_bytes)
    if not isinstance(source, str):
        raise DataError(
            f"{type(source).__name__} is no form of an image: give a path, URL, base64 text, bytes or PIL image"
        )
    return _read_text(source, reach, max_bytes)


def _read_text(text: str, reach: Reach, max_bytes: int) -> Encoded:
    if text.startswith("data:"):
        return _decode_base64(text.partition(",")[2], "the image in a data URL", max_bytes)
    if _WEB_URL.match(text):
        return _download(text, reach, max_bytes)
    if _FILE_URL.match(text):
        return _read_file(_path_of(text), reach, max_bytes)
    is_long = len(text) > 255
    if is_long and _BASE64.fullmatch("".join(text.split())):
        return _decode_base64(text, "an image in base64", max_bytes)
    if not is_long and _BASE64.fullmatch(text) and not _is_file(Path(text), reach):
        return _decode_base64(text, "an image in base64", max_bytes)
    return _read_file(Path(text), reach, max_bytes)


def _path_of(url: str) -> Path:
    """The path of a `file:` URL; names in it are percent-encoded (RFC 8089)."""
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost"):
        raise DataError(f"image {shortened(url)} lies on another machine: file:// is followed by /, then the path")
    return Path(os.fsdecode(unquote_to_bytes(slash + path)))


def _read_file(path: Path, reach: Reach, max_bytes: int) -> Encoded:
    full = _full(path, reach)
    name = f"image file {shortened(str(full))}"
    try:
        real = locate(path, reach)
        # Looked at before it is opened: to open a device may set something off.
        if not stat.S_ISREG(real.lstat().st_mode):
            raise DataError(f"{name} cannot be read: it is no regular file")
        with os.fdopen(os.open(real, _OPEN_FLAGS), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"{name} cannot be read: it is no regular file")
            _check_size(found.st_size, name, max_bytes)
            content = file.read(found.st_size + 1)
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    _check_size(len(content), name, max_bytes)
    return Encoded(content, f"image {shortened(str(full))}")


def _full(path: Path, reach: Reach) -> Path:
    if reach.start is None:
        raise DataError("an image is given as a path, and files are not read here")
    if path.parts[:1] == ("~",):  # `~name` may be nobody's home: it is a name like others
        path = path.expanduser()
    return reach.start / path


def locate(path: Path, reach: Reach) -> Path:
    """Where a file is, without symbolic links. DataError when that is out of reach, whether or not there is a file."""
    full = _full(path, reach)
    real = Path(os.path.realpath(full))
    if any(real.is_relative_to(folder) for folder in reach.folders):
        return real
    where = "" if real == full else f" (it is {shortened(str(real))})"
    raise DataError(
        f"image file {shortened(str(full))} lies outside the dataset's folder{where}: if you trust the dataset, name "
        "the image's folder in data.image_roots"
    )


def _is_file(path: Path, reach: Reach) -> bool:
    try:
        return locate(path, reach).is_file()
    except (OSError, ValueError, DataError):  # base64 text can hold what is not allowed in a file name
        return False


def _decode_base64(text: str, name: str, max_bytes: int) -> Encoded:
    compact = "".join(text.split())
    _check_size(len(compact) // 4 * 3, name, max_bytes)
    compact = compact.replace("-", "+").replace("_", "/")
    try:
        return Encoded(base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True), name)
    except (binascii.Error, ValueError) as error:  # ValueError: characters outside ASCII
        raise DataError(f"{name} is not valid base64") from error


def _download(url: str, reach: Reach, max_bytes: int) -> Encoded:
    name = f"image {shortened(re.sub(r'[?#].*', '', url, flags=re.DOTALL))}"  # what follows may be a secret
    if not reach.allow_urls:
        raise DataError(f"{name} is on the web: if you trust the dataset, set data.allow_image_urls")
    return Encoded(download(url, name, max_bytes=max_bytes), name)


def _check_size(num_bytes: int, name: str, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise DataError(f"{name} is larger than {max_bytes / 2**20:g} MiB: raise data.max_image_mib")


def shortened(text: str) -> str:
    """The text for a message."""
    return text if len(text) <= 120 else f"{text[:117]}..."
