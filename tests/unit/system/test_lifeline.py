"""A child with a lifeline dies with its parent."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlmrl.system.lifeline import Lifeline, arm

SCRIPT = """
import multiprocessing, os, sys, threading, time
from vlmrl.system.lifeline import Lifeline

def child(lifeline):
    print(os.getpid(), flush=True)
    time.sleep(60)

def start():
    argument = Lifeline() if sys.argv[1] == "armed" else None
    multiprocessing.get_context("spawn").Process(target=child, args=(argument,)).start()

if __name__ == "__main__":
    # Started from a thread that ends, as engines are: only the end of the process may matter.
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("armed", ["armed", "not armed"])
def test_a_child_with_a_lifeline_dies_with_its_killed_parent_and_not_before(tmp_path: Path, armed: str) -> None:
    (tmp_path / "parent.py").write_text(SCRIPT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py", armed], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.6)
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + (10 if armed == "armed" else 1)
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        survived = is_alive(child)
        if survived:
            subprocess.run(["kill", "-9", str(child)], check=True)
    assert survived == (armed == "not armed")


def test_the_parent_and_unrelated_processes_are_not_armed() -> None:
    assert isinstance(pickle.loads(pickle.dumps(Lifeline())), Lifeline)
    with subprocess.Popen(["sleep", "5"]) as stranger:
        arm(stranger.pid)
        stranger.kill()
    time.sleep(0.5)


def test_an_orphan_that_is_armed_late_dies_immediately() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
        script = f"from vlmrl.system.lifeline import arm; arm({gone.pid}); print('alive')"
        orphan = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGKILL, "")
