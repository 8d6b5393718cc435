"""The live display on a pseudo-terminal: nothing is torn or lost, and the terminal is usable after every end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from terminal_screen import Shown, run_on_terminal

from vlmrl.observe.terminal import Lines, TerminalStream

RUN = """
import os, subprocess, sys, threading, time
from pathlib import Path
from vlmrl.errors import ClusterError
from vlmrl.observe.log import run_log
from vlmrl.observe.progress import Progress
from vlmrl.system.stops import handle_signals, interruptible_wait

def body(progress):
{body}

print("before")
with handle_signals(5.0), run_log() as log:
    log.move_to(Path(sys.argv[1]))
    held = sys.stdout
    with Progress(title="vlmrl rl", place="runs/a") as progress:
        body(progress)
print("after")
"""


def show(tmp_path: Path, body: str, **options: object) -> Shown:
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return run_on_terminal(RUN.format(body=indented), str(tmp_path / "run.log"), **options)  # type: ignore[arg-type]


LOUD = """
progress.begin(total_steps=3)
def speak(name):
    for number in range(200):
        print(f"{name} {number}", file=sys.stderr if number % 2 else held)
        if number % 20 == 0:
            time.sleep(0.01)
threads = [threading.Thread(target=speak, args=(name,)) for name in ("a", "b")]
[thread.start() for thread in threads]
for step in range(1, 4):
    with progress.phase("rollout"):
        for number in range(100):
            progress.advance(number, 100)
            if number % 10 == 0:
                progress.say(f"message {step} {number}")
                time.sleep(0.01)
        os.write(1, b"native output\\n")
        os.write(2, b"native error\\n")
        subprocess.run(["echo", "a child"])
    progress.step(step, {"reward/mean": step / 4, "time/step_s": 0.5, "eval/toy/pass@1": step / 4})
[thread.join() for thread in threads]
sys.stderr.write("\\r10%\\r20%")
"""


@pytest.mark.parametrize("columns", [100, 48])
def test_output_of_all_threads_is_above_the_panel_whole_and_once(tmp_path: Path, columns: int) -> None:
    shown = show(tmp_path, LOUD, columns=columns)
    top = next(i for i, row in enumerate(shown.rows) if row.startswith("╭"))
    above, below = shown.rows[:top], shown.rows[top:]
    assert above[0] == "before"
    messages = [f"message {step} {number}" for step in (1, 2, 3) for number in range(0, 100, 10)]
    assert [row for row in above if row.startswith("message")] == messages
    for name in ("a", "b"):
        assert [row for row in above if row.startswith(f"{name} ")] == [f"{name} {number}" for number in range(200)]
    assert len(above) == 1 + 30 + 400
    assert [row for row in below if not row.startswith(("╭", "│", "╰"))] == ["20%", "after", ""]
    assert (tmp_path / "run.log").read_text().splitlines().count("a child") == 3


def test_the_last_panel_stays_with_its_results(tmp_path: Path) -> None:
    shown = show(tmp_path, LOUD)
    panel = "\n".join(row for row in shown.rows if row.startswith("│"))
    for part in ("3/3", "▁▅█", "0.250 -> 0.750", "25.0% at step 1 -> 75.0% at step 3"):
        assert part in panel
    assert shown.rows.count("before") == 1
    assert "\x1b[?25l" not in shown.output, "a hidden cursor stays hidden when the process is killed"


WAIT = """
progress.begin(total_steps=3)
with interruptible_wait(), progress.phase("rollout"):
    time.sleep(1.0)
    os.write({descriptor}, b"ready")
    time.sleep(60)
"""


def send(*numbers: int) -> object:
    """Send signals, one each time that the panel was drawn again, from the third drawing on."""
    left = list(numbers)

    def on_output(output: bytes, process: subprocess.Popen[bytes]) -> None:
        if left and output.count(b"rollout") > 2 + 6 * (len(numbers) - len(left)):
            process.send_signal(left.pop(0))

    return on_output


def test_ctrl_c_leaves_the_panel_and_a_clean_line(tmp_path: Path) -> None:
    shown = show(tmp_path, WAIT.replace("{descriptor}", "1"), on_output=send(signal.SIGINT))
    bottom = next(i for i, row in enumerate(shown.rows) if row.startswith("╰"))
    assert sum(row.startswith("╭") for row in shown.rows) == 1
    assert shown.rows[bottom + 1].startswith("Traceback"), "the test's program does not catch the interruption"
    assert "Stopped" in shown.rows[-2]
    assert shown.column == 0


HANG = """
progress.begin(total_steps=3)
with progress.phase("rollout"):
    from vlmrl.system.stops import uninterrupted
    with uninterrupted():
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("numbers", "last"),
    [((signal.SIGKILL,), None), ((signal.SIGINT, signal.SIGINT), "vlmrl: ended immediately: SIGINT came after SIGINT")],
)
def test_a_process_that_is_killed_leaves_a_clean_line(
    tmp_path: Path, numbers: tuple[int, ...], last: str | None
) -> None:
    shown = show(tmp_path, HANG, on_output=send(*numbers))
    assert shown.exit_code in (-signal.SIGKILL, 130)
    bottom = next(i for i, row in enumerate(shown.rows) if row.startswith("╰"))
    assert sum(row.startswith("╭") for row in shown.rows) == 1
    assert [row for row in shown.rows[bottom + 1 :] if row] == ([last] if last else [])
    assert shown.column == 0


def test_a_narrow_terminal_has_no_line_that_wraps(tmp_path: Path) -> None:
    shown = show(tmp_path, LOUD, columns=48)
    assert max(len(row) for row in shown.rows) == 48
    assert all(row.endswith(("│", "╮", "╯")) for row in shown.rows if row.startswith(("│", "╭", "╰")))


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'os.environ["TERM"]\nprogress.begin(total_steps=1)\nprogress.step(1, {"reward/mean": 0.5})'
    script = RUN.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    shown = run_on_terminal(f"import os; os.environ['TERM'] = 'dumb'\n{script}", str(tmp_path / "run.log"))
    assert shown.rows == ["before", "step 1/1  reward 0.500", "after", ""]


def test_lines_of_threads_are_kept_apart_and_progress_bars_are_one_line() -> None:
    lines: list[str] = []
    collected = Lines(lines.append)
    collected.write("one\ntw")
    collected.write("o\n\x1b[31mred\x1b[0m\r\n")
    collected.write("\r10%")
    collected.write("\r20%")
    assert lines == ["one", "two", "red"]
    collected.finish()
    assert lines == ["one", "two", "red", "20%"]


def test_a_progress_bar_that_never_ends_its_line_takes_no_memory() -> None:
    lines: list[str] = []
    collected = Lines(lines.append)
    for _ in range(3000):
        collected.write("\r" + "x" * 100)
    assert len("".join(collected._partial.values())) < 1 << 17
    collected.finish()
    assert lines == ["x" * 100]


def test_a_diverted_stream_is_no_terminal() -> None:
    ours, theirs = os.openpty()
    stream, written = TerminalStream(theirs), []
    assert stream.isatty()
    with stream.divert(written.append):
        assert not stream.isatty()
        stream.write("text")
    assert (written, stream.isatty()) == (["text"], True)
    os.close(ours)
    os.close(theirs)
