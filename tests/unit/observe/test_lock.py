"""The lock admits one run at a time to a folder, on one machine and on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import ConfigError, StorageError
from vlmrl.observe import lock
from vlmrl.observe.lock import NAME, Holder, refuse_if_locked, run_lock, this_process


def plant(folder: Path, holder: Holder) -> Path:
    file = folder / NAME
    file.write_text(json.dumps(asdict(holder)))
    return file


def never(line: str) -> None:
    pytest.fail(line)


def dead() -> Holder:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return replace(this_process(), pid=int(process.stdout), started="1")


@contextmanager
def touched(file: Path) -> Iterator[None]:
    """Touch a lock every 0.1 s, as its holder does."""
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(0.1):
            os.utime(file)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


ELSEWHERE = Holder("node7", "another boot", 1234, "1", "2026-01-02 03:04:05 UTC")


def test_a_folder_in_use_is_refused_with_host_process_and_time(tmp_path: Path) -> None:
    with run_lock(tmp_path, on_lost=never):
        holder = json.loads((tmp_path / NAME).read_text())
        expected = (
            rf"is in use by process {os.getpid()} on {holder['host']}, since {holder['since']}: wait for that run"
        )
        with pytest.raises(ConfigError, match=expected):
            refuse_if_locked(tmp_path)
        with pytest.raises(ConfigError, match=expected), run_lock(tmp_path, on_lost=never):
            pytest.fail("two runs in one folder")
        assert (tmp_path / NAME).exists(), "the refused run leaves the lock alone"
    assert list(tmp_path.iterdir()) == [], "the lock is removed"
    refuse_if_locked(tmp_path)


def test_the_lock_of_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    plant(tmp_path, dead())
    refuse_if_locked(tmp_path)
    lines: list[str] = []
    with run_lock(tmp_path, on_lost=never, notify=lines.append):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert len(lines) == 1
    assert "that run has ended" in lines[0]


def test_a_reused_process_id_does_not_hold_the_lock(tmp_path: Path) -> None:
    plant(tmp_path, replace(this_process(), started="1"))
    with run_lock(tmp_path, on_lost=never):
        pass


def test_a_lock_of_another_machine_is_held_while_touched(tmp_path: Path) -> None:
    file = plant(tmp_path, ELSEWHERE)
    refuse_if_locked(tmp_path)  # does not wait
    with (
        touched(file),
        pytest.raises(ConfigError, match="is in use by process 1234 on node7, since 2026-01-02 03:04:05 UTC"),
        run_lock(tmp_path, on_lost=never, stale_s=30.0),
    ):
        pytest.fail("two runs in one folder")


@pytest.mark.parametrize("content", [json.dumps(asdict(ELSEWHERE)), ""], ids=["another machine's", "torn"])
def test_an_untouched_lock_is_stale(content: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(content)
    lines: list[str] = []
    with run_lock(tmp_path, on_lost=never, notify=lines.append, stale_s=0.3):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert "waiting 0.3 s to see whether it is still held" in lines[0]


def test_the_holder_touches_its_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path, on_lost=never, heartbeat_s=0.05):
        os.utime(tmp_path / NAME, ns=(0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / NAME).stat().st_mtime_ns == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / NAME).stat().st_mtime_ns > 0


def test_a_run_whose_lock_was_taken_is_notified(tmp_path: Path) -> None:
    lost: list[str] = []
    is_lost = threading.Event()
    with run_lock(tmp_path, on_lost=lambda line: (lost.append(line), is_lost.set())[0], heartbeat_s=0.05):
        plant(tmp_path, ELSEWHERE)
        assert is_lost.wait(10)
    assert "was taken over by process 1234 on node7" in lost[0]
    assert (tmp_path / NAME).exists(), "it belongs to the other run"


def test_a_deleted_lock_is_written_again(tmp_path: Path) -> None:
    with run_lock(tmp_path, on_lost=never, heartbeat_s=0.05):
        (tmp_path / NAME).unlink()
        deadline = time.monotonic() + 10
        while not (tmp_path / NAME).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / NAME).exists()


def test_only_one_of_several_runs_takes_over_a_stale_lock(tmp_path: Path) -> None:
    plant(tmp_path, dead())
    code = (
        "import sys; from pathlib import Path; from vlmrl.observe.lock import run_lock\n"
        "sys.stdin.read(1)\n"
        "with run_lock(Path(sys.argv[1]), on_lost=print):\n"
        "    print('held', flush=True); sys.stdin.read(1)\n"
    )
    root = Path(lock.__file__).parents[2]
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, stderr=-1, cwd=root)
        for _ in range(4)
    ]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write(b"x")
        run.stdin.flush()
    deadline = time.monotonic() + 60
    while sum(run.poll() is None for run in runs) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    outputs = [run.communicate(b"x", timeout=30) for run in runs]
    assert [out for out, _ in outputs].count(b"held\n") == 1
    assert sum(b"is in use by process" in error for _, error in outputs) == 3


def test_the_lock_works_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with (
        run_lock(tmp_path, on_lost=never),
        pytest.raises(ConfigError, match="is in use by"),
        run_lock(tmp_path, on_lost=never),
    ):
        pytest.fail("two runs in one folder")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot be written: No such file"),
        run_lock(tmp_path / "gone", on_lost=never),
    ):
        pytest.fail("it is held")


def test_a_read_only_disk_does_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(path))

    def run() -> None:
        with run_lock(tmp_path, on_lost=never):
            monkeypatch.setattr(Path, "unlink", refuse)
            raise StorageError("read-only")

    with pytest.raises(StorageError, match=r"^read-only$"):
        run()


def test_an_unreadable_lock_is_held_while_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plant(tmp_path, ELSEWHERE)
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == file:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with (
        touched(file),
        pytest.raises(ConfigError, match="is in use by another run"),
        run_lock(tmp_path, on_lost=never, stale_s=2.0),
    ):
        pytest.fail("two runs in one folder")
