"""The private folder of a run's temporary files, which is removed at its end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmrl.errors import ClusterError
from vlmrl.system import scratch as module
from vlmrl.system.scratch import VARIABLE, enter_from_environment, remove_here, scratch, sweep


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: one of pytest's is too long for sockets."""
    for name in ("RAY_TMPDIR", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_the_folder_is_private_whatever_the_umask_and_gone_at_the_end(parent: Path) -> None:
    mask = os.umask(0)
    try:
        with scratch() as folder:
            assert folder.parent == parent
            assert folder.stat().st_mode & 0o777 == 0o700
            assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(folder)
            child = subprocess.check_output([sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"])
            assert Path(child.decode().strip()).parent == folder
            # Ray does the same with its own folder.
            (folder / "session").mkdir()
            (folder / "session").chmod(0o777)
    finally:
        os.umask(mask)
    assert not list(parent.iterdir())
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(parent)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("is_removed_by_another_machine", [False, True])
def test_a_process_that_used_multiprocessing_ends_without_a_traceback(
    is_removed_by_another_machine: bool, parent: Path
) -> None:
    code = (
        "from multiprocessing import util\nfrom vlmrl.system.scratch import remove_here, scratch\n"
        "with scratch() as folder:\n    assert util.get_temp_dir().startswith(str(folder))\n"
        f"    if {is_removed_by_another_machine}:\n        remove_here(folder)\n"
        "with scratch() as folder:\n    assert util.get_temp_dir().startswith(str(folder))\n"
        "assert not util.get_temp_dir().startswith(str(folder))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(parent.iterdir())


def test_it_is_gone_after_an_error_too(parent: Path) -> None:
    with pytest.raises(ValueError, match="mine"), scratch():
        raise ValueError("mine")
    assert not list(parent.iterdir())


def test_a_call_within_another_gives_the_same_folder(parent: Path) -> None:
    with scratch() as folder:
        with scratch() as same:
            assert same == folder
        assert folder.exists()
    assert not list(parent.iterdir())


def test_a_folder_that_cannot_be_made_is_an_error_for_the_user(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc")
    with (
        pytest.raises(ClusterError, match=r"^no folder for temporary files \(.*\): set TMPDIR to one of yours$"),
        scratch(),
    ):
        pytest.fail("it was made")


def test_removal_waits_for_processes_that_use_the_folder(parent: Path) -> None:
    code = "import time; from vlmrl.system.scratch import enter_from_environment as e; e(); print(1, flush=True)"
    with scratch() as folder:
        worker = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(0.5)"], stdout=subprocess.PIPE)
        assert worker.stdout is not None
        worker.stdout.readline()
        started = time.monotonic()
    assert 0.3 < time.monotonic() - started < module._END_S
    worker.communicate()
    assert not folder.exists()


def test_folders_of_killed_runs_are_removed_and_of_running_ones_kept(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time; from vlmrl.system.scratch import *\nwith scratch() as f: print(f, flush=True); time.sleep(60)"
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    dead, alive = (Path(run.stdout.readline().strip()) for run in runs if run.stdout is not None)
    runs[0].send_signal(signal.SIGKILL)
    runs[0].communicate()
    foreign = parent / "somebody-elses"
    foreign.mkdir()
    sweep(parent)
    assert dead.exists()  # young: its run might be about to lock it
    monkeypatch.setattr(module, "_YOUNG_S", -1.0)
    sweep(parent)
    assert not dead.exists()
    assert alive.exists()
    assert foreign.exists()
    runs[1].kill()
    runs[1].communicate()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_another_user_is_not_used(is_link: bool, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_held", {})
    planted, target = parent / "planted", parent / "target"
    target.mkdir(mode=0o700)
    if is_link:
        planted.symlink_to(target)
    else:
        planted.mkdir()
        planted.chmod(0o755)
    with pytest.raises(PermissionError, match="is not a private folder of this user"):
        module.enter(planted)
    monkeypatch.setenv(VARIABLE, str(planted))
    enter_from_environment()
    temporary = Path(tempfile.gettempdir())
    assert temporary not in (planted, target)
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert not list(target.iterdir())


def test_other_machines_create_it_in_their_own_temporary_folder(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_held", {})
    folder = Path("/no/such/place/vlmrl-run-abc")
    monkeypatch.setenv(VARIABLE, str(folder))
    enter_from_environment()
    here = parent / "vlmrl-run-abc"
    assert tempfile.gettempdir() == str(here)
    assert here.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TMPDIR", str(parent))
    monkeypatch.setattr(tempfile, "tempdir", None)
    remove_here(folder)
    assert not here.exists()


def test_a_path_that_is_too_long_for_sockets_is_left(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = parent / "a-folder-of-a-batch-job"
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch() as folder:
        assert folder.parent == Path("/tmp")
        of_ray = f"{folder}/r/session_2026-11-22_02-00-07_562491_4194304/sockets/plasma_store"
        assert len(of_ray) <= 107


def test_a_path_in_which_ray_does_not_start_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Path(tempfile.mkdtemp(prefix="\u00fc", dir="/tmp"))
    try:
        monkeypatch.setenv("TMPDIR", str(parent))
        monkeypatch.setattr(tempfile, "tempdir", None)
        with scratch() as folder:
            assert folder.parent == Path("/tmp")
    finally:
        parent.rmdir()


def test_a_folder_whose_lock_cannot_be_opened_counts_as_used(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parent / "vlmrl-run-other"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    os.utime(folder, (0, 0))

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "open", fail)
        assert module._is_used(folder)
    sweep(parent)
    assert not folder.exists()


def test_folders_of_killed_runs_on_other_machines_are_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = parent / "vlmrl-run-left"
    left.mkdir(mode=0o700)
    (left / "lock").touch()
    os.utime(left, (0, 0))
    monkeypatch.setenv(VARIABLE, str(parent / "vlmrl-run-mine"))
    enter_from_environment()
    assert [path.name for path in parent.iterdir()] == ["vlmrl-run-mine"]
    os.close(module._held.pop(parent / "vlmrl-run-mine"))
