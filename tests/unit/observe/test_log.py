"""Error output of libraries goes to a file; that of Python and our own line go to the terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl.errors import ClusterError
from vlmrl.observe.log import run_log

BODY = """
import logging, os, sys
from pathlib import Path
from vlmrl.errors import ClusterError
from vlmrl.observe.log import run_log
loud = logging.getLogger("ray.core")
try:
    with run_log() as log:
        os.write(2, b"native before\\n")
        {keep}
        os.write(2, b"native after\\n")
        loud.error("Unhandled error\\nTraceback of forty lines")
        print("for people", file=sys.stderr)
        kept = sys.stderr
        log.write("our own dump\\n")
        {end}
except ClusterError as error:
    print(error, file=sys.stderr)
os.write(2, b"as ever\\n")
print("kept", file=kept)
"""


def stderr_of(keep: str, end: str) -> str:
    script = BODY.format(keep=keep, end=end)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr


def test_libraries_write_into_the_file_and_the_error_names_it(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "run.log"
    file.parent.mkdir()
    file.write_text("an earlier run\n")
    output = stderr_of(f"log.move_to(Path({str(file)!r}))", 'raise ClusterError("data died")')
    assert output.splitlines() == [
        "for people",
        f"data died (output of Ray and libraries: {file})",
        "as ever",
        "kept",
    ]
    lines = file.read_text().splitlines()
    assert lines[:3] == ["an earlier run", "native before", "native after"]
    assert lines[3].endswith("ERROR ray.core: Unhandled error")
    assert lines[4:] == ["Traceback of forty lines", "our own dump"]


def test_without_a_file_only_a_bug_is_reported_with_the_captured_output() -> None:
    assert stderr_of("pass", 'raise ClusterError("no memory")').splitlines() == [
        "for people",
        "no memory",
        "as ever",
        "kept",
    ]
    output = stderr_of("pass", "1 / 0")
    assert "native before" in output
    assert "ZeroDivisionError" in output


def test_an_empty_log_is_not_named(tmp_path: Path) -> None:
    def run() -> None:
        with run_log() as log:
            log.move_to(tmp_path / "run.log")
            raise ClusterError("data died")

    with pytest.raises(ClusterError) as error:
        run()
    assert str(error.value) == "data died"


def test_the_message_of_an_immediate_end_reaches_the_terminal(tmp_path: Path) -> None:
    output = stderr_of(
        f"log.move_to(Path({str(tmp_path / 'run.log')!r}))",
        "from vlmrl.system import stops; stops.kill_and_exit('over', 2)",
    )
    assert output.splitlines() == ["for people", "vlmrl: over"]


def test_a_deleted_folder_does_not_hide_the_error_that_ended_the_run(tmp_path: Path) -> None:
    def run() -> None:
        with run_log() as log:
            log.move_to(tmp_path / "logs" / "run.log")
            log.write("words")
            shutil.rmtree(tmp_path / "logs")
            raise ClusterError("data died")

    with pytest.raises(ClusterError, match=r"^data died$"):
        run()


WITHOUT_READER = """
import sys
from pathlib import Path
from vlmrl.observe.log import run_log
from vlmrl.observe.progress import Progress
print("first")
with run_log() as log, Progress() as progress:
    log.move_to(Path(sys.argv[1]))
    sys.stdout.write("second\\n")
    sys.stdin.readline()
    print("nobody reads this", file=sys.stderr)
    progress.say("nor this")
    progress.step(1, {})
sys.exit(7)
"""


def test_a_run_continues_when_the_reader_of_its_output_ends(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_READER, str(tmp_path / "run.log")], stdin=-1, stdout=-1, stderr=subprocess.STDOUT
    )
    assert run.stdin is not None
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in range(2)] == [b"first\n", b"second\n"]
    run.stdout.close()
    run.stdin.close()
    assert run.wait(60) == 7


def test_a_run_continues_when_its_terminal_is_closed(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_READER, str(tmp_path / "run.log")], stdin=-1, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert run.stdin is not None
    output = b""
    while b"second" not in output:
        output += os.read(ours, 4096)
    os.close(ours)
    run.stdin.close()
    assert run.wait(60) == 7
