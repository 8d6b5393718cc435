import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from vlmrl.observe.progress import Progress, _duration
from vlmrl.system import stops


class Clock:
    """A clock that tests advance."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(*, is_terminal: bool = False, is_quiet: bool = False) -> tuple[Progress, Clock, io.StringIO]:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100, _environ={"TERM": "xterm"})
    return Progress(console=console, clock=clock, title="vlmrl rl", is_quiet=is_quiet), clock, out


def test_times_cover_the_phases_since_the_last_call() -> None:
    progress, clock, _ = made()
    progress.begin(total_steps=2)
    for seconds in (3.0, 1.0):
        with progress.phase("rollout"):
            clock.now += seconds
    clock.now += 0.5
    assert progress.take_times() == {"time/rollout_s": 4.0, "time/step_s": 4.5}
    with progress.phase("update"):
        clock.now += 2.0
    assert progress.take_times() == {"time/update_s": 2.0, "time/step_s": 2.0}


def test_a_nested_phase_is_not_counted_twice() -> None:
    progress, clock, _ = made()
    progress.begin(total_steps=1)
    with progress.phase("save"):
        clock.now += 1.0
        with progress.phase("eval"):
            clock.now += 5.0
        clock.now += 1.0
    assert progress.take_times() == {"time/eval_s": 5.0, "time/save_s": 2.0, "time/step_s": 7.0}


def test_time_before_the_first_step_is_not_counted() -> None:
    progress, clock, _ = made()
    with progress.phase("start"):
        clock.now += 60.0
    progress.begin(total_steps=1)
    clock.now += 1.0
    assert progress.take_times() == {"time/step_s": 1.0}


def test_a_phase_ends_when_it_raises() -> None:
    progress, clock, _ = made()
    progress.begin(total_steps=1)

    def fail() -> None:
        with progress.phase("update"):
            clock.now += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with progress.phase("rollout"):
        clock.now += 2.0
    assert progress.take_times() == {"time/update_s": 1.0, "time/rollout_s": 2.0, "time/step_s": 3.0}


def test_without_a_terminal_a_step_is_one_line() -> None:
    progress, _, out = made()
    with progress:
        progress.begin(total_steps=10)
        progress.evaluation(0, {"eval/math/pass@1": 0.42, "eval/math/reward": 0.4})
        progress.step(1, {"reward/mean": 0.5, "time/step_s": 10.0, "throughput/tokens_per_s": 1234.0})
        progress.step(2, {"reward/mean": 0.75, "time/step_s": 20.0, "eval/math/pass@1": 0.7})
    assert out.getvalue().splitlines() == [
        "eval math: pass@1 42.0% at step 0",
        "step 1/10  reward 0.500  tokens/s 1,234  s/step 10.0  left 1 min 30 s",
        "step 2/10  reward 0.750  s/step 20.0  left 2 min 0 s",
        "eval math: pass@1 42.0% at step 0 -> 70.0% at step 2",
    ]


def test_a_reward_models_accuracy_on_held_out_pairs_is_shown() -> None:
    progress, _, out = made()
    with progress:
        progress.begin(total_steps=1)
        progress.evaluation(0, {"eval/pairs/accuracy": 0.5, "eval/pairs/loss": 0.7})
        progress.step(1, {"rm/loss": 0.6, "rm/accuracy": 0.75, "eval/pairs/accuracy": 0.875})
    assert out.getvalue().splitlines() == [
        "eval pairs: accuracy 50.0% at step 0",
        "step 1/1  loss 0.6000  accuracy 0.750",
        "eval pairs: accuracy 50.0% at step 0 -> 87.5% at step 1",
    ]


def test_an_evaluation_with_a_breakdown_is_one_line_with_the_latest_parts() -> None:
    progress, _, out = made()
    with progress:
        progress.begin(total_steps=10)
        for step, value in ((0, 0.25), (2, 0.5)):
            metrics = {"eval/math/sums/pass@1": value, "eval/math/pass@1": value, "eval/math/clock/pass@1": 0.0}
            progress.evaluation(step, metrics)
    assert out.getvalue().splitlines() == [
        "eval math: pass@1 25.0% at step 0 (clock 0.0%, sums 25.0%)",
        "eval math: pass@1 25.0% at step 0 -> 50.0% at step 2 (clock 0.0%, sums 50.0%)",
    ]


def test_a_resumed_run_estimates_the_remaining_time() -> None:
    progress, _, out = made()
    progress.begin(total_steps=10, done=7)
    progress.step(8, {"time/step_s": 5.0})
    progress.step(10, {"time/step_s": 5.0})
    assert out.getvalue().splitlines() == ["step 8/10  s/step 5.0  left 10 s", "step 10/10  s/step 5.0"]


def test_a_terminal_shows_the_phase_and_its_progress() -> None:
    progress, clock, out = made(is_terminal=True)
    with progress:
        progress.begin(total_steps=10)
        progress.step(1, {"reward/mean": 0.5, "time/step_s": 10.0, "eval/math/pass@1": 0.7})
        with progress.phase("rollout"):
            progress.advance(97, 128)
            clock.now += 5.0
            progress.say(progress._render())
    shown = out.getvalue()
    for part in ("vlmrl rl", "1/10", "97/128", "5 s", "left 1 min 30 s", "0.500", "70.0% at step 1"):
        assert part in shown
    assert "step 1/10  reward" not in shown, "a panel replaces the lines"


def test_a_terminal_shows_that_the_run_is_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, _, out = made(is_terminal=True)
    with progress:
        progress.begin(total_steps=10)
        monkeypatch.setattr(stops, "is_stopping", lambda: True)
        progress.say(progress._render())
    assert "vlmrl rl is stopping" in out.getvalue()


def test_a_terminal_shows_the_start_before_the_first_step() -> None:
    progress, clock, out = made(is_terminal=True)
    with progress:
        clock.now += 12.0
        progress.say(progress._render())
    assert re.search(r"starting.*12 s", out.getvalue())


def test_a_quiet_run_prints_messages_only() -> None:
    for is_terminal in (False, True):
        progress, _, out = made(is_terminal=is_terminal, is_quiet=True)
        with progress:
            progress.say(Table("placement"))
            progress.say("row 7 dropped")
            progress.begin(total_steps=2)
            progress.evaluation(0, {"eval/math/pass@1": 0.42})
            progress.step(1, {"reward/mean": 0.5, "eval/math/pass@1": 0.5})
        assert out.getvalue() == "row 7 dropped\n"


def test_a_quiet_evaluation_prints_its_result() -> None:
    progress, _, out = made(is_quiet=True)
    with progress:
        progress.begin(total_steps=0)
        progress.evaluation(0, {"eval/math/pass@1": 0.42})
    assert out.getvalue() == "eval math: pass@1 42.0% at step 0\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_a_message_is_plain_text_on_one_line() -> None:
    for is_terminal in (False, True):
        progress, _, out = made(is_terminal=is_terminal)
        progress.say("row a dropped: img[/x].png [bold]\n\x1b[31m :smile: 7")
        assert out.getvalue() == "row a dropped: img[/x].png [bold]\\n\\x1b[31m :smile: 7\n"
