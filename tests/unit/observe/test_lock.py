"""One run at a time in a folder, on one machine and over several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import ConfigError, StorageError
from vlmrl.observe import lock
from vlmrl.observe.lock import NAME, Holder, held, refuse_if_live, this_process


def plant(folder: Path, holder: Holder) -> Path:
    file = folder / NAME
    file.write_text(json.dumps(asdict(holder)))
    return file


def never(line: str) -> None:
    pytest.fail(line)


def dead() -> Holder:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return replace(this_process(), pid=int(process.stdout), started="1")


ELSEWHERE = Holder("node7", "another boot", 1234, "1", "2026-01-02 03:04:05 UTC")


def test_a_folder_in_use_is_refused_with_host_process_and_since_when(tmp_path: Path) -> None:
    with held(tmp_path, lost=never):
        holder = json.loads((tmp_path / NAME).read_text())
        wanted = rf"is in use by process {os.getpid()} on {holder['host']}, since {holder['since']}: wait for that run"
        with pytest.raises(ConfigError, match=wanted):
            refuse_if_live(tmp_path)
        with pytest.raises(ConfigError, match=wanted), held(tmp_path, lost=never):
            pytest.fail("two runs in one folder")
        assert (tmp_path / NAME).exists(), "who was refused leaves the lock alone"
    assert list(tmp_path.iterdir()) == [], "nothing is left of a lock"
    refuse_if_live(tmp_path)


def test_the_lock_of_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    plant(tmp_path, dead())
    refuse_if_live(tmp_path)
    said: list[str] = []
    with held(tmp_path, lost=never, say=said.append):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert len(said) == 1
    assert "that run is no more" in said[0]


def test_another_process_with_the_id_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    plant(tmp_path, replace(this_process(), started="1"))
    with held(tmp_path, lost=never):
        pass


def test_a_lock_of_another_machine_is_held_while_somebody_touches_it(tmp_path: Path) -> None:
    file = plant(tmp_path, ELSEWHERE)
    refuse_if_live(tmp_path)  # waits for nothing
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(0.1):
            os.utime(file)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with (
            pytest.raises(ConfigError, match="is in use by process 1234 on node7, since 2026-01-02 03:04:05 UTC"),
            held(tmp_path, lost=never, stale_s=30.0),
        ):
            pytest.fail("two runs in one folder")
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("content", [json.dumps(asdict(ELSEWHERE)), ""], ids=["another machine's", "torn"])
def test_a_lock_that_nobody_touches_any_more_is_stale(content: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(content)
    said: list[str] = []
    with held(tmp_path, lost=never, say=said.append, stale_s=0.3):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert "waiting 0.3 s for a sign of life" in said[0]


def test_a_lock_that_is_held_is_touched(tmp_path: Path) -> None:
    with held(tmp_path, lost=never, beat_s=0.05):
        os.utime(tmp_path / NAME, ns=(0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / NAME).stat().st_mtime_ns == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / NAME).stat().st_mtime_ns > 0


def test_who_was_asleep_while_another_took_the_lock_writes_nothing_any_more(tmp_path: Path) -> None:
    lost: list[str] = []
    is_lost = threading.Event()
    with held(tmp_path, lost=lambda line: (lost.append(line), is_lost.set())[0], beat_s=0.05):
        plant(tmp_path, ELSEWHERE)
        assert is_lost.wait(10)
    assert "was taken over by process 1234 on node7" in lost[0]
    assert (tmp_path / NAME).exists(), "it is the other's now"


def test_a_lock_that_was_removed_by_hand_comes_back(tmp_path: Path) -> None:
    with held(tmp_path, lost=never, beat_s=0.05):
        (tmp_path / NAME).unlink()
        deadline = time.monotonic() + 10
        while not (tmp_path / NAME).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / NAME).exists()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    plant(tmp_path, dead())
    code = (
        "import sys; from pathlib import Path; from vlmrl.observe.lock import held\n"
        "sys.stdin.read(1)\n"
        "with held(Path(sys.argv[1]), lost=print):\n"
        "    print('held', flush=True); sys.stdin.read(1)\n"
    )
    root = Path(lock.__file__).parents[2]
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, stderr=-1, cwd=root)
        for _ in range(4)
    ]
    for one in runs:
        assert one.stdin is not None
        one.stdin.write(b"x")
        one.stdin.flush()
    deadline = time.monotonic() + 60
    while sum(one.poll() is None for one in runs) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    said = [one.communicate(b"x", timeout=30) for one in runs]
    assert [out for out, _ in said].count(b"held\n") == 1
    assert sum(b"is in use by process" in error for _, error in said) == 3


def test_without_hard_links_a_lock_is_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with held(tmp_path, lost=never), pytest.raises(ConfigError, match="is in use by"), held(tmp_path, lost=never):
        pytest.fail("two runs in one folder")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: No such file"), held(tmp_path / "gone", lost=never):
        pytest.fail("it is held")


def test_a_disk_that_turned_read_only_does_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(path))

    def run() -> None:
        with held(tmp_path, lost=never):
            monkeypatch.setattr(Path, "unlink", refuse)
            raise StorageError("read-only")

    with pytest.raises(StorageError, match=r"^read-only$"):
        run()


def test_a_lock_that_another_user_lets_nobody_read_is_held_while_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plant(tmp_path, ELSEWHERE)
    opened = Path.open

    def refuse(path: Path, *how: Any, **named: Any) -> Any:
        if path == file:
            raise PermissionError(13, "Permission denied")
        return opened(path, *how, **named)

    monkeypatch.setattr(Path, "open", refuse)
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(0.1):
            os.utime(file)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="is in use by another run"), held(tmp_path, lost=never, stale_s=2.0):
            pytest.fail("two runs in one folder")
    finally:
        is_over.set()
        thread.join()
