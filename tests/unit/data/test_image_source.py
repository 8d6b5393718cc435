import base64
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from vlmrl.config.data import Columns
from vlmrl.data.image_source import NO_ACCESS, ImageAccess, locate, read
from vlmrl.errors import ConfigError, DataError

CONTENT = b"an image"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset's folder with an image, and another folder with an image beside it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_bytes(CONTENT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.png").write_bytes(CONTENT)
    return tmp_path / "mine"


def content(source: Any, root: Path | None, *, max_bytes: int = 100, **settings: Any) -> bytes:
    return read(source, access=ImageAccess.of(root, Columns(**settings)), max_bytes=max_bytes).content


@pytest.mark.parametrize(
    "form", ["a.png", "./a.png", "../mine/a.png", "{}/a.png", "file://{}/a.png", {"path": "a.png"}]
)
def test_images_of_the_datasets_own_folder_are_read(folder: Path, form: Any) -> None:
    source = form.format(folder) if isinstance(form, str) else form
    assert content(source, folder) == CONTENT


@pytest.mark.parametrize(
    "form", ["../other/b.png", "{}/b.png", "file://{}/b.png", "FILE://localhost{}/b.png", "/etc/passwd", "~/b.png"]
)
def test_files_elsewhere_are_refused_unless_their_folder_is_allowed(folder: Path, form: str) -> None:
    other = folder.parent / "other"
    for source in (form.format(other), {"bytes": None, "path": form.format(other)}):
        with pytest.raises(DataError, match=r"is outside the dataset's folder.*to data\.image_roots$"):
            content(source, folder)
    if "{}" in form or ".." in form:
        assert content(form.format(other), folder, image_roots=(str(other),)) == CONTENT
        assert content(form.format(other), folder, image_roots=("/proc", str(folder.parent))) == CONTENT


def test_an_image_root_must_be_a_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.image_roots: /nowhere is not a folder$"):
        content("a.png", folder, image_roots=("/nowhere",))


def test_the_error_does_not_reveal_whether_a_forbidden_file_exists(folder: Path) -> None:
    with pytest.raises(DataError, match="is outside the dataset's folder"):
        content("../other/gone.png", folder)
    with pytest.raises(DataError, match=r"gone\.png does not exist"):
        content("gone.png", folder)


def test_a_folder_with_the_same_name_prefix_is_another_folder(folder: Path) -> None:
    beside = folder.parent / "mine_too"
    beside.mkdir()
    (beside / "c.png").write_bytes(CONTENT)
    with pytest.raises(DataError, match="is outside"):
        content("../mine_too/c.png", folder)


def test_symbolic_links_are_resolved_before_the_folder_is_checked(folder: Path) -> None:
    (folder / "inside.png").symlink_to("a.png")
    (folder / "outside.png").symlink_to("../other/b.png")
    (folder / "album").symlink_to("../other")
    (folder / "round").symlink_to("round")
    assert content("inside.png", folder) == CONTENT
    for name in ("outside.png", "album/b.png"):
        with pytest.raises(DataError, match=rf"mine/{name} is outside the dataset's folder \(it is .*/other/b\.png\)"):
            content(name, folder)
        assert content(name, folder, image_roots=(str(folder.parent / "other"),)) == CONTENT
    with pytest.raises(DataError, match="cannot be read"):
        content("round", folder)
    # A dataset's folder may itself be a link.
    (folder.parent / "link").symlink_to("mine")
    assert content("a.png", folder.parent / "link") == CONTENT
    assert content(str(folder / "a.png"), folder.parent / "link") == CONTENT


def test_image_root_sets_where_relative_paths_start_and_both_folders_are_allowed(folder: Path) -> None:
    other = str(folder.parent / "other")
    assert content("b.png", folder, image_root=other) == CONTENT
    assert content("../mine/a.png", folder, image_root=other) == CONTENT
    with pytest.raises(DataError, match=r"other/a\.png does not exist"):
        content("a.png", folder, image_root=other)


def test_without_a_dataset_folder_the_working_directory_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert content("a.png", None) == CONTENT
    with pytest.raises(DataError, match="is outside"):
        content("../other/b.png", None)


def test_a_request_may_access_no_file_and_no_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for source in ("a.png", str(folder / "a.png"), f"file://{folder}/a.png", {"path": "a.png"}, Path("a.png")):
        with pytest.raises(DataError, match="files are not read here"):
            read(source, access=NO_ACCESS, max_bytes=100)
    with pytest.raises(DataError, match=r"data\.allow_image_urls"):
        read("HTTP://example.org/a.png?secret=1", access=NO_ACCESS, max_bytes=100)


def test_special_files_are_refused_without_blocking(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    refusals: list[str] = []

    def read_all() -> None:
        for source in ("pipe.png", "zero.png", "/dev/zero", "/dev/stdin", "."):
            with pytest.raises(DataError, match="cannot be read: it is not a regular file") as error:
                content(source, folder, image_roots=("/dev", "/proc"))
            refusals.append(str(error.value))

    thread = threading.Thread(target=read_all, daemon=True)
    thread.start()
    thread.join(10)
    assert len(refusals) == 5


def test_the_size_of_an_image_is_limited(folder: Path) -> None:
    assert content("a.png", folder, max_bytes=8) == CONTENT
    with (folder / "huge.png").open("wb") as huge:
        huge.truncate(2**40)
    for source in ("a.png", CONTENT, base64.b64encode(b"x" * 300).decode(), "data:image/png;base64,eHh4eHh4eHh4"):
        with pytest.raises(DataError, match=r"is larger than .* MiB: raise data\.max_image_mib"):
            content(source, folder, max_bytes=7)
    with pytest.raises(DataError, match="is larger than 64 MiB"):
        content("huge.png", folder, max_bytes=64 * 2**20)


def test_a_file_of_size_zero_is_not_read_to_its_end(folder: Path) -> None:
    # Files of /proc are regular, have no size, and some never end.
    assert len(content("/proc/self/status", folder, image_roots=("/proc",))) == 1


def test_names_in_a_file_url_are_percent_encoded(folder: Path) -> None:
    for name in ("two words.png", "50%.png", "a#1?.png", "ä.png", "%41.png"):
        (folder / name).write_bytes(name.encode())
    assert content(f"file://{folder}/two%20words.png", folder) == b"two words.png"
    assert content(f"file://localhost{folder}/50%25.png", folder) == b"50%.png"
    assert content(f"file://{folder}/%C3%A4.png", folder) == "ä.png".encode()
    assert content(f"file://{folder}/%2541.png", folder) == b"%41.png"
    # Not encoded, but unambiguous.
    assert content(f"file://{folder}/a#1?.png", folder) == b"a#1?.png"
    assert content(f"file://{folder}/two words.png", folder) == b"two words.png"
    # A plain path is not decoded.
    assert content("%41.png", folder) == b"%41.png"
    with pytest.raises(DataError, match="is on another machine"):
        content("file://server/share/a.png", folder)
    with pytest.raises(DataError, match="is outside"):
        content(f"file://{folder}/%2e%2e/other/b.png", folder)


def test_the_home_of_an_unknown_user_is_an_ordinary_name(folder: Path) -> None:
    with pytest.raises(DataError, match=r"~nosuch/x\.png does not exist"):
        content("~nosuch/x.png", folder)


def test_base64_is_decoded_unless_a_file_has_that_name(folder: Path) -> None:
    text = "/etc" + "A" * 40
    assert content(text, folder) == base64.b64decode(text)
    (folder / ("A" * 40)).write_bytes(CONTENT)
    assert content("A" * 40, folder) == CONTENT


def test_locate_checks_the_access(folder: Path) -> None:
    access = ImageAccess.of(folder, Columns())
    assert locate(Path("x/../a.png"), access) == folder.resolve() / "a.png"
    with pytest.raises(DataError, match="is outside"):
        locate(Path("/etc/passwd"), access)
