"""Disks that are full, read-only or gone, for real: a small tmpfs where mounting is allowed, limits elsewhere."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_disk import small_disk, turn_read_only

from vlmrl.errors import StorageError
from vlmrl.system.storage import check_room, format_bytes, size_of, writing
from vlmrl.trainer.run_checkpoints import naming_checkpoint

BIG = torch.zeros(2_000_000)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    with small_disk(tmp_path / "disk", mib=4) as folder:
        yield folder


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS: dict[str, Callable[[Path], object]] = {
    "torch": lambda folder: torch.save(BIG, folder / "a.pt"),
    "torch_legacy": lambda folder: torch.save(BIG, folder / "a.pt", _use_new_zipfile_serialization=False),
    "safetensors": lambda folder: save_file({"a": BIG}, folder / "a.safetensors"),
    "python": lambda folder: (folder / "a.txt").write_text("a" * 8_000_000),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_line_with_the_folder_and_its_free_space(full_disk: Path, name: str) -> None:
    with pytest.raises(StorageError) as caught, writing("the checkpoint of step 3", full_disk):
        WRITERS[name](full_disk)
    line = str(caught.value)
    assert line.startswith(f"the checkpoint of step 3 cannot be written to {full_disk}: No space left on device (")
    assert line.endswith(" of 4.0 MiB free): free some space there")
    assert "\n" not in line
    assert not list(full_disk.glob(".probe*"))


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_turned_read_only_is_one_line(full_disk: Path, name: str) -> None:
    turn_read_only(full_disk)
    with pytest.raises(StorageError, match=r"Read-only file system .*mount it writable again"):  # noqa: SIM117
        with writing("metrics", full_disk):
            WRITERS[name](full_disk)


@pytest.mark.parametrize("name", WRITERS)
def test_a_limit_on_the_size_of_files_is_one_line(tmp_path: Path, name: str) -> None:
    with largest_file(2 << 20), pytest.raises(StorageError, match=r"File too large .*ulimit -f unlimited"):  # noqa: SIM117
        with writing("the model", tmp_path):
            WRITERS[name](tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_is_gone_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match=r"No such file or directory .*the folder is gone"):  # noqa: SIM117
        with writing("the model", tmp_path / "gone"):
            WRITERS[name](tmp_path / "gone")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing("the model", tmp_path):
        raise KeyError("weight")
    with pytest.raises(RuntimeError, match="size mismatch"), writing("the model", tmp_path):
        raise RuntimeError("size mismatch")
    with pytest.raises(FileNotFoundError), writing("the model", tmp_path):
        (tmp_path / "nothing").read_text()
    inner = StorageError("told already")
    with pytest.raises(StorageError) as caught, writing("the model", tmp_path):
        raise inner
    assert caught.value is inner


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EACCES])
def test_errors_of_disks_and_file_servers_are_explained(tmp_path: Path, number: int) -> None:
    with pytest.raises(StorageError, match=os.strerror(number)), writing("the model", tmp_path):
        raise OSError(number, os.strerror(number))


def test_room_is_checked_in_the_nearest_existing_folder(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_room(free // 2, "the checkpoint", tmp_path / "checkpoints" / "not yet")
    with pytest.raises(StorageError) as caught:
        check_room(2**60, "the checkpoint of step 4", tmp_path / "checkpoints", hint="lower --ckpt.max_num")
    line = str(caught.value)
    assert line.startswith(f"the checkpoint of step 4 takes about {2**30}.0 GiB, for which {tmp_path} has no room (")
    assert line.endswith("free): lower --ckpt.max_num")


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(bytes(1000))
    (tmp_path / "c").write_bytes(bytes(24))
    assert size_of(tmp_path) == 1024
    assert [format_bytes(n) for n in (2**19, 2**30, 5 * 2**29)] == ["0.5 MiB", "1.0 GiB", "2.5 GiB"]


def test_a_disk_without_a_free_space_report_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object, **__: object) -> object:
        raise OSError(errno.ESTALE, "Stale file handle")

    def run() -> None:
        with naming_checkpoint(tmp_path), writing("metrics.jsonl", tmp_path):
            monkeypatch.setattr(os, "stat", stale)
            monkeypatch.setattr(os, "scandir", stale)
            raise OSError(errno.ESTALE, "Stale file handle")

    with pytest.raises(StorageError) as caught:
        run()
    monkeypatch.undo()
    assert str(caught.value) == (
        f"metrics.jsonl cannot be written to {tmp_path}: Stale file handle: the file server has lost the folder: mount "
        "it again"
    )
