"""What libraries write to the error stream goes to a file; what Python writes there, and our one line, to people."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl.errors import ClusterError
from vlmrl.observe.log import logged

BODY = """
import logging, os, sys
from pathlib import Path
from vlmrl.errors import ClusterError
from vlmrl.observe.log import logged
loud = logging.getLogger("ray.core")
try:
    with logged() as log:
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


def ran(keep: str, end: str) -> str:
    script = BODY.format(keep=keep, end=end)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr


def test_libraries_write_into_the_file_and_the_error_names_it(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "run.log"
    file.parent.mkdir()
    file.write_text("an earlier run\n")
    said = ran(f"log.keep_in(Path({str(file)!r}))", 'raise ClusterError("data died")')
    assert said.splitlines() == [
        "for people",
        f"data died (what Ray and the libraries wrote: {file})",
        "as ever",
        "kept",
    ]
    lines = file.read_text().splitlines()
    assert lines[:3] == ["an earlier run", "native before", "native after"]
    assert lines[3].endswith("ERROR ray.core: Unhandled error")
    assert lines[4:] == ["Traceback of forty lines", "our own dump"]


def test_an_error_before_there_is_a_folder_is_told_alone_and_a_bug_with_all_that_is_known() -> None:
    assert ran("pass", 'raise ClusterError("no memory")').splitlines() == ["for people", "no memory", "as ever", "kept"]
    said = ran("pass", "1 / 0")
    assert "native before" in said
    assert "ZeroDivisionError" in said


def test_a_quiet_run_has_no_log_to_name(tmp_path: Path) -> None:
    def run() -> None:
        with logged() as log:
            log.keep_in(tmp_path / "run.log")
            raise ClusterError("data died")

    with pytest.raises(ClusterError) as error:
        run()
    assert str(error.value) == "data died"


def test_what_the_end_of_a_run_says_at_once_reaches_people(tmp_path: Path) -> None:
    said = ran(
        f"log.keep_in(Path({str(tmp_path / 'run.log')!r}))",
        "from vlmrl.system import stops; stops.kill_and_exit('over', 2)",
    )
    assert said.splitlines() == ["for people", "vlmrl: over"]


def test_a_folder_that_is_gone_does_not_hide_what_ended_the_run(tmp_path: Path) -> None:
    def run() -> None:
        with logged() as log:
            log.keep_in(tmp_path / "logs" / "run.log")
            log.write("words")
            shutil.rmtree(tmp_path / "logs")
            raise ClusterError("data died")

    with pytest.raises(ClusterError, match=r"^data died$"):
        run()


WITHOUT_READER = """
import sys
from pathlib import Path
from vlmrl.observe.log import logged
from vlmrl.observe.progress import Progress
print("first")
with logged() as log, Progress() as progress:
    log.keep_in(Path(sys.argv[1]))
    sys.stdout.write("second\\n")
    sys.stdin.readline()
    print("nobody reads this", file=sys.stderr)
    progress.say("nor this")
    progress.step(1, {})
sys.exit(7)
"""


def test_a_run_goes_on_when_nobody_reads_any_more(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_READER, str(tmp_path / "run.log")], stdin=-1, stdout=-1, stderr=subprocess.STDOUT
    )
    assert run.stdin is not None
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in range(2)] == [b"first\n", b"second\n"]
    run.stdout.close()
    run.stdin.close()
    assert run.wait(60) == 7


def test_a_run_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_READER, str(tmp_path / "run.log")], stdin=-1, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert run.stdin is not None
    said = b""
    while b"second" not in said:
        said += os.read(ours, 4096)
    os.close(ours)
    run.stdin.close()
    assert run.wait(60) == 7
