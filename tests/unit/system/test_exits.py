"""The end of this process, and exit codes of others that are not its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl.system import exits as endings
from vlmrl.system.exits import Pidfd, fatal_signal, format_exit, may_be_out_of_memory, oom_kills


def tells_exit_codes() -> bool:
    with subprocess.Popen(["true"]) as child:
        process = Pidfd(child.pid)
    code = process.returncode()
    process.close()
    return code == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_kernel_reports_the_exit_code_of_a_process(body: str, code: int) -> None:
    if not tells_exit_codes():
        pytest.skip("Linux before 6.15 tells parents alone")
    with subprocess.Popen([sys.executable, "-c", f"input(); {body}"], stdin=subprocess.PIPE) as child:
        process = Pidfd(child.pid)
        assert process.returncode(patience_s=0.0) is None, "it is still running"
        assert child.stdin is not None
        child.stdin.write(b"\n")
    assert process.returncode() == code
    process.close()
    process.close()


def test_the_exit_code_of_a_process_that_was_gone_is_unknown() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert Pidfd(child.pid).returncode() is None


def test_a_signal_is_read_from_the_output_of_the_fault_handler(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    body = "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", body], stderr=file, check=False)
    assert fatal_signal(log) == -signal.SIGSEGV
    log.write_text("nothing happened\n")
    assert fatal_signal(log) is None
    assert fatal_signal(tmp_path / "none") is None


def test_oom_kills_are_read_from_the_container_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    machine.write_text("nr_free_pages 5\noom_kill 7\n")
    monkeypatch.setattr(endings, "_COUNTERS", (container, machine))
    assert oom_kills() == 7
    container.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills() == 2


@pytest.mark.parametrize(
    ("code", "out_of_memory", "message", "memory"),
    [
        (3, False, "ended with exit code 3", False),
        (-11, False, "was killed by signal 11 (SIGSEGV)", False),
        (-9, False, "was killed by signal 9 (SIGKILL)", True),
        (-9, True, "was killed by the kernel: out of memory", True),
        (None, False, "ended without a message, as a killed process does", True),
        (-40, False, "was killed by signal 40 (no name)", False),
    ],
)
def test_an_exit_is_formatted(code: int | None, out_of_memory: bool, message: str, memory: bool) -> None:
    assert format_exit(code, is_out_of_memory=out_of_memory) == message
    assert may_be_out_of_memory(code) == memory


def test_descriptors_are_closed() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    process = Pidfd(os.getpid())
    process.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("code", "expected", "errors"), [("None", 0, ""), ("3", 3, ""), ("'a reason'", 1, "a reason\n")]
)
def test_a_process_ends_as_python_does_but_unloads_nothing(code: str, expected: int, errors: str) -> None:
    script = f"""
import atexit, sys, threading, time
from vlmrl.system.exits import end_process

class Unloaded:
    def __del__(self):
        print("unloaded")

kept = Unloaded()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("not flushed\\n")
end_process({code})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "not flushed\nthread\nat exit\n", errors)


def test_a_process_does_not_wait_for_threads_that_were_abandoned() -> None:
    script = """
import atexit, time
from concurrent.futures import ThreadPoolExecutor
from vlmrl.system import exits

exits._ABANDONED_S = 0.2
atexit.register(time.sleep, 600)
atexit.register(print, "at exit")
ThreadPoolExecutor().submit(time.sleep, 600)
print("ended")
exits.abandon("a service")
exits.end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "ended\nat exit\n")
