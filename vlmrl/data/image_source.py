"""Read the bytes of an image or a video from the row itself, a file or the web, within what the dataset may access."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote_to_bytes

from vlmrl.config.data import Columns
from vlmrl.data.download import download
from vlmrl.errors import ConfigError, DataError

_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")
_FILE_URL = re.compile(r"file://", re.IGNORECASE)
_WEB_URL = re.compile(r"https?://", re.IGNORECASE)
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Non-blocking, since opening a FIFO would wait for a writer."""


@dataclass(frozen=True, slots=True)
class ImageAccess:
    """Files and addresses that the images and videos of a dataset may be read from; by default only inline bytes."""

    start: Path | None = None
    """Folder that relative paths start from; None: no file may be read."""
    folders: tuple[Path, ...] = ()
    """Files must lie below one of these after symbolic links are resolved."""
    allow_urls: bool = False
    """Whether images may be downloaded from public addresses."""

    @classmethod
    def of(cls, root: Path | None, columns: Columns, extra: Sequence[Path] = ()) -> ImageAccess:
        """Return the access of a dataset in the folder `root` (None: the working directory) and the folders `extra`.

        Raises:
            ConfigError: one of `data.image_roots` is not a folder.
        """
        dataset_folder = Path() if root is None else root
        start = dataset_folder if columns.image_root is None else Path(columns.image_root).expanduser()
        image_roots = [Path(folder).expanduser() for folder in columns.image_roots]
        if missing := [folder for folder in image_roots if not folder.is_dir()]:
            raise ConfigError(f"data.image_roots: {missing[0]} is not a folder")
        folders = (start, *([] if root is None else [root]), *image_roots, *extra)
        return cls(start, tuple(Path(os.path.realpath(folder)) for folder in folders), columns.allow_image_urls)


NO_ACCESS = ImageAccess()
"""For images sent with a request, which carry their own bytes."""


Kind = Literal["image", "video"]
_A: dict[Kind, str] = {"image": "an image", "video": "a video"}


class Encoded(NamedTuple):
    """An image or a video before it is decoded."""

    content: bytes
    name: str
    """Its name in messages."""


def read(source: Any, *, access: ImageAccess, max_bytes: int, kind: Kind = "image") -> Encoded:
    """Read the encoded bytes of an image or a video.

    A source is bytes, base64 text, a `data:`, `file:` or `http(s):` URL, a path, or Hugging Face's
    `{"bytes": ..., "path": ...}`.

    Raises:
        DataError: it has another form, is missing, has more than `max_bytes` bytes, or `access` does not allow it.
    """
    if isinstance(source, Mapping):
        content, path = source.get("bytes"), source.get("path")
        if content is None and path is None:
            raise DataError(f"{_A[kind]} has neither bytes nor path, only: {', '.join(map(str, source)) or 'nothing'}")
        source = path if content is None else content
    if isinstance(source, bytes | bytearray | memoryview):
        _check_size(len(source), f"{_A[kind]} of {len(source)} bytes", max_bytes, kind)
        return Encoded(bytes(source), f"{_A[kind]} of {len(source)} bytes")
    if isinstance(source, Path):
        return _read_file(source, access, max_bytes, kind)
    if not isinstance(source, str):
        forms = "PIL image" if kind == "image" else "list of frames"
        raise DataError(f"{type(source).__name__} is not {_A[kind]}: give a path, URL, base64 text, bytes or {forms}")
    return _read_text(source, access, max_bytes, kind)


def _read_text(text: str, access: ImageAccess, max_bytes: int, kind: Kind) -> Encoded:
    if text.startswith("data:"):
        return _decode_base64(text.partition(",")[2], f"the {kind} in a data URL", max_bytes, kind)
    if _WEB_URL.match(text):
        return _download(text, access, max_bytes, kind)
    if _FILE_URL.match(text):
        return _read_file(_url_path(text, kind), access, max_bytes, kind)
    is_long = len(text) > 255
    if is_long and _BASE64.fullmatch("".join(text.split())):
        return _decode_base64(text, f"{_A[kind]} in base64", max_bytes, kind)
    if not is_long and _BASE64.fullmatch(text) and not _is_file(Path(text), access):
        return _decode_base64(text, f"{_A[kind]} in base64", max_bytes, kind)
    return _read_file(Path(text), access, max_bytes, kind)


def _url_path(url: str, kind: Kind) -> Path:
    """Return the path of a `file:` URL, in which names are percent-encoded (RFC 8089)."""
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost"):
        raise DataError(f"{kind} {shorten(url)} is on another machine: file:// must be followed by an absolute path")
    return Path(os.fsdecode(unquote_to_bytes(slash + path)))


def _read_file(path: Path, access: ImageAccess, max_bytes: int, kind: Kind) -> Encoded:
    full = _full_path(path, access, kind)
    name = f"{kind} file {shorten(str(full))}"
    try:
        real = locate(path, access, kind)
        # Checked before it is opened: opening a device can have side effects.
        if not stat.S_ISREG(real.lstat().st_mode):
            raise DataError(f"{name} cannot be read: it is not a regular file")
        with os.fdopen(os.open(real, _OPEN_FLAGS), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{name} cannot be read: it is not a regular file")
            _check_size(status.st_size, name, max_bytes, kind)
            content = file.read(status.st_size + 1)
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    _check_size(len(content), name, max_bytes, kind)
    return Encoded(content, f"{kind} {shorten(str(full))}")


def _full_path(path: Path, access: ImageAccess, kind: Kind) -> Path:
    if access.start is None:
        raise DataError(f"the {kind} is a path, but files are not read here")
    if path.parts[:1] == ("~",):  # only `~` itself: `~name` may be an ordinary file name
        path = path.expanduser()
    return access.start / path


def locate(path: Path, access: ImageAccess, kind: Kind = "image") -> Path:
    """Resolve the symbolic links of a path. Raises DataError if `access` forbids it, whether or not it exists."""
    full = _full_path(path, access, kind)
    real = Path(os.path.realpath(full))
    if any(real.is_relative_to(folder) for folder in access.folders):
        return real
    where = "" if real == full else f" (it is {shorten(str(real))})"
    raise DataError(
        f"{kind} file {shorten(str(full))} is outside the dataset's folder{where}: if you trust the dataset, add "
        f"the {kind}'s folder to data.image_roots"
    )


def _is_file(path: Path, access: ImageAccess) -> bool:
    try:
        return locate(path, access).is_file()
    except (OSError, ValueError, DataError):  # base64 text may not be a valid file name
        return False


def _decode_base64(text: str, name: str, max_bytes: int, kind: Kind) -> Encoded:
    compact = "".join(text.split())
    _check_size(len(compact) // 4 * 3, name, max_bytes, kind)
    compact = compact.replace("-", "+").replace("_", "/")
    try:
        return Encoded(base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True), name)
    except (binascii.Error, ValueError) as error:  # ValueError: characters outside ASCII
        raise DataError(f"{name} is not valid base64") from error


def _download(url: str, access: ImageAccess, max_bytes: int, kind: Kind) -> Encoded:
    name = f"{kind} {shorten(re.sub(r'[?#].*', '', url, flags=re.DOTALL))}"  # the query may hold a secret
    if not access.allow_urls:
        raise DataError(f"{name} is on the web: if you trust the dataset, set data.allow_image_urls")
    return Encoded(download(url, name, max_bytes=max_bytes, setting=f"data.max_{kind}_mib"), name)


def _check_size(num_bytes: int, name: str, max_bytes: int, kind: Kind) -> None:
    if num_bytes > max_bytes:
        raise DataError(f"{name} is larger than {max_bytes / 2**20:g} MiB: raise data.max_{kind}_mib")


def shorten(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= 120 else f"{text[:117]}..."
