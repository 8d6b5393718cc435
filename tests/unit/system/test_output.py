import subprocess
import sys
from pathlib import Path

PRINTS = """
import os, sys
from pathlib import Path
from vlmrl.system.output import print_to
print_to(Path(sys.argv[1]))
print("a line")
os.system("echo natively")
print("half a line", end="")
print("x" * 100_000, file=sys.stderr)
sys.stdout.flush()
os._exit(7)
"""


def test_output_is_written_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "functions.log"
    assert subprocess.run([sys.executable, "-c", PRINTS, log], check=False).returncode == 7
    assert log.read_text() == "a line\nnatively\n" + "x" * 100_000 + "\nhalf a line"
    assert log.stat().st_mode & 0o111 == 0, "it is no program"


def test_a_full_disk_drops_output() -> None:
    done = subprocess.run([sys.executable, "-c", PRINTS, "/dev/full"], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (7, b"")
