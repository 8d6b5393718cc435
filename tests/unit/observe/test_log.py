"""What libraries write to the error stream goes to a file; what Python writes there, and our one line, to people."""

from __future__ import annotations

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
