"""What an engine's processes write: kept, and searched for the cause."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from vlmrl.rollout.console import Console, find_cause


def test_the_cause_is_the_last_exception_that_follows_from_no_other() -> None:
    lines = [
        "(EngineCore pid=7) INFO 11-20 18:36:00 [core.py:133] Initializing",
        "(EngineCore pid=7) (Worker pid=8) ERROR 11-20 18:36:00 [x.py:953] ValueError: first",
        "(EngineCore pid=7) ERROR 11-20 18:36:01 [core.py:1510]     raise ValueError('x')",
        "(EngineCore pid=7) ERROR 11-20 18:36:01 [core.py:1510] safetensors_rust.SafetensorError: header too small",
        "Exception: WorkerProc initialization failed due to an exception in a background process.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert find_cause(lines) == "safetensors_rust.SafetensorError: header too small"
    assert find_cause(lines[:2]) == "ValueError: first"
    assert find_cause(lines[:1]) is None


def test_a_child_writes_to_the_console_it_was_born_in(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import time; print('one', flush=True); time.sleep(0.3); raise ValueError('two')"
    console = Console()
    with console:
        os.write(1, b"inside\n")
        child = subprocess.Popen([sys.executable, "-c", script])
    os.write(2, b"outside\n")
    child.wait()
    deadline = time.monotonic() + 5
    while console.cause() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert console.cause() == "ValueError: two"
    assert capfd.readouterr() == ("", "outside\n")


def test_nothing_is_caught_where_vllm_was_asked_to_talk(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with Console():
        os.write(2, b"talk\n")
    assert capfd.readouterr().err == "talk\n"
