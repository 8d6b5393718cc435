import base64
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from vlmrl.config.data import Columns
from vlmrl.data.image_source import NOWHERE, Reach, locate, read
from vlmrl.errors import ConfigError, DataError

CONTENT = b"an image"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset's folder with an image in it, and one beside it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_bytes(CONTENT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.png").write_bytes(CONTENT)
    return tmp_path / "mine"


def content(source: Any, root: Path | None, *, max_bytes: int = 100, **settings: Any) -> bytes:
    return read(source, reach=Reach.of(root, Columns(**settings)), max_bytes=max_bytes).content


@pytest.mark.parametrize(
    "form", ["a.png", "./a.png", "../mine/a.png", "{}/a.png", "file://{}/a.png", {"path": "a.png"}]
)
def test_images_of_the_datasets_own_folder_are_read(folder: Path, form: Any) -> None:
    source = form.format(folder) if isinstance(form, str) else form
    assert content(source, folder) == CONTENT


@pytest.mark.parametrize(
    "form", ["../other/b.png", "{}/b.png", "file://{}/b.png", "FILE://localhost{}/b.png", "/etc/passwd", "~/b.png"]
)
def test_no_other_file_is_in_reach_unless_its_folder_is_named(folder: Path, form: str) -> None:
    other = folder.parent / "other"
    for source in (form.format(other), {"bytes": None, "path": form.format(other)}):
        with pytest.raises(DataError, match=r"lies outside the dataset's folder.*in data\.image_roots$"):
            content(source, folder)
    if "{}" in form or ".." in form:
        assert content(form.format(other), folder, image_roots=(str(other),)) == CONTENT
        assert content(form.format(other), folder, image_roots=("/proc", str(folder.parent))) == CONTENT


def test_a_root_that_is_no_folder_is_a_mistake(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.image_roots: /nowhere is no folder$"):
        content("a.png", folder, image_roots=("/nowhere",))


def test_whether_a_file_out_of_reach_exists_is_not_told(folder: Path) -> None:
    with pytest.raises(DataError, match="lies outside the dataset's folder"):
        content("../other/gone.png", folder)
    with pytest.raises(DataError, match=r"gone\.png does not exist"):
        content("gone.png", folder)


def test_a_folder_whose_name_begins_like_the_datasets_is_another(folder: Path) -> None:
    beside = folder.parent / "mine_too"
    beside.mkdir()
    (beside / "c.png").write_bytes(CONTENT)
    with pytest.raises(DataError, match="lies outside"):
        content("../mine_too/c.png", folder)


def test_symbolic_links_are_followed_before_the_folder_is_checked(folder: Path) -> None:
    (folder / "inside.png").symlink_to("a.png")
    (folder / "outside.png").symlink_to("../other/b.png")
    (folder / "album").symlink_to("../other")
    (folder / "round").symlink_to("round")
    assert content("inside.png", folder) == CONTENT
    for name in ("outside.png", "album/b.png"):
        with pytest.raises(
            DataError, match=rf"mine/{name} lies outside the dataset's folder \(it is .*/other/b\.png\)"
        ):
            content(name, folder)
        assert content(name, folder, image_roots=(str(folder.parent / "other"),)) == CONTENT
    with pytest.raises(DataError, match="cannot be read"):
        content("round", folder)
    # A dataset's folder may itself be a link.
    (folder.parent / "link").symlink_to("mine")
    assert content("a.png", folder.parent / "link") == CONTENT
    assert content(str(folder / "a.png"), folder.parent / "link") == CONTENT


def test_where_relative_paths_start_can_be_chosen_and_both_folders_are_in_reach(folder: Path) -> None:
    other = str(folder.parent / "other")
    assert content("b.png", folder, image_root=other) == CONTENT
    assert content("../mine/a.png", folder, image_root=other) == CONTENT
    with pytest.raises(DataError, match=r"other/a\.png does not exist"):
        content("a.png", folder, image_root=other)


def test_without_a_folder_the_working_directory_is_the_datasets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert content("a.png", None) == CONTENT
    with pytest.raises(DataError, match="lies outside"):
        content("../other/b.png", None)


def test_a_request_reaches_no_file_and_no_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for source in ("a.png", str(folder / "a.png"), f"file://{folder}/a.png", {"path": "a.png"}, Path("a.png")):
        with pytest.raises(DataError, match="files are not read here"):
            read(source, reach=NOWHERE, max_bytes=100)
    with pytest.raises(DataError, match=r"data\.allow_image_urls"):
        read("HTTP://example.org/a.png?secret=1", reach=NOWHERE, max_bytes=100)


def test_what_is_no_regular_file_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    refusals: list[str] = []

    def look() -> None:
        for source in ("pipe.png", "zero.png", "/dev/zero", "/dev/stdin", "."):
            with pytest.raises(DataError, match="cannot be read: it is no regular file") as error:
                content(source, folder, image_roots=("/dev", "/proc"))
            refusals.append(str(error.value))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(10)
    assert len(refusals) == 5


def test_a_file_is_read_up_to_the_bound_and_no_further(folder: Path) -> None:
    assert content("a.png", folder, max_bytes=8) == CONTENT
    with (folder / "huge.png").open("wb") as huge:
        huge.truncate(2**40)
    for source in ("a.png", CONTENT, base64.b64encode(b"x" * 300).decode(), "data:image/png;base64,eHh4eHh4eHh4"):
        with pytest.raises(DataError, match=r"is larger than .* MiB: raise data\.max_image_mib"):
            content(source, folder, max_bytes=7)
    with pytest.raises(DataError, match="is larger than 64 MiB"):
        content("huge.png", folder, max_bytes=64 * 2**20)


def test_a_file_that_says_it_is_empty_is_not_read_for_ever(folder: Path) -> None:
    # Files of /proc are regular, have no size, and some never end.
    assert len(content("/proc/self/status", folder, image_roots=("/proc",))) == 1


def test_names_in_a_file_url_are_percent_encoded(folder: Path) -> None:
    for name in ("two words.png", "50%.png", "a#1?.png", "ä.png", "%41.png"):
        (folder / name).write_bytes(name.encode())
    assert content(f"file://{folder}/two%20words.png", folder) == b"two words.png"
    assert content(f"file://localhost{folder}/50%25.png", folder) == b"50%.png"
    assert content(f"file://{folder}/%C3%A4.png", folder) == "ä.png".encode()
    assert content(f"file://{folder}/%2541.png", folder) == b"%41.png"
    # Not encoded, but not to be mistaken for anything else.
    assert content(f"file://{folder}/a#1?.png", folder) == b"a#1?.png"
    assert content(f"file://{folder}/two words.png", folder) == b"two words.png"
    # A path is no URL.
    assert content("%41.png", folder) == b"%41.png"
    with pytest.raises(DataError, match="lies on another machine"):
        content("file://server/share/a.png", folder)
    with pytest.raises(DataError, match="lies outside"):
        content(f"file://{folder}/%2e%2e/other/b.png", folder)


def test_a_home_that_nobody_has_is_a_name_like_others(folder: Path) -> None:
    with pytest.raises(DataError, match=r"~nosuch/x\.png does not exist"):
        content("~nosuch/x.png", folder)


def test_base64_is_no_file_wherever_it_would_lie(folder: Path) -> None:
    text = "/etc" + "A" * 40
    assert content(text, folder) == base64.b64decode(text)
    (folder / ("A" * 40)).write_bytes(CONTENT)
    assert content("A" * 40, folder) == CONTENT


def test_what_is_located_is_in_reach(folder: Path) -> None:
    reach = Reach.of(folder, Columns())
    assert locate(Path("x/../a.png"), reach) == folder.resolve() / "a.png"
    with pytest.raises(DataError, match="lies outside"):
        locate(Path("/etc/passwd"), reach)
