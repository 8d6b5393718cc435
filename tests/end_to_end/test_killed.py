"""Asynchronous runs that are killed again and again, in each phase of a step, train on every prompt once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_ahead import command, transcripts
from test_resume import assert_nothing_is_left, read_metrics

from vlmrl.system import fork_server

pytestmark = pytest.mark.prove

PHASES = ("verify_again", "update", "settle", "sync", "save")
"""Phases of a step. The engine samples in the first three of them."""
RUNS = 4
"""Runs of which each is killed once per phase, in the driver or the trainer's rank."""
STEPS = len(PHASES) + 2
PARTIAL = {"train.async_queue_size": "2", "train.partial_rollout_enable": "true"}
KILLED = Path(__file__).with_name("killed_run.py")
MARK = uuid.uuid4().hex
"""Shown by the environment of all processes of these runs."""

Point = tuple[int, str, str, float]
"""Step, phase, process, and seconds after the phase begins. See `killed_run.py`."""


class Runs:
    """Runs of one command, with a mark on all their processes."""

    def __init__(self, start: tuple[str, str], out: Path, **flags: str) -> None:
        """`start`: model and reward."""
        values = {"train.max_steps": str(STEPS), "rollout.max_new_tokens": "24"} | flags
        more = [word for name, value in values.items() for word in (f"--{name}", value)]
        self.words = command(start[0], out, start[1]) + more
        self.out = out

    def start(self, points: Sequence[Point] = ()) -> tuple[int, str]:
        """Run, or resume, until the end or until the first point that ends the run; return exit code and output."""
        words = [sys.executable, str(KILLED), json.dumps(points), *self.words[3:], "--ckpt.load_enable"]
        # With its own fork server, whose forks show its environment. No pipe: what is left of a killed run holds it.
        variables = os.environ | {"VLMRL_TEST_RUN": MARK, fork_server.VARIABLE: ""}
        log = self.out.with_suffix(".log")
        with log.open("a") as file:
            ended = subprocess.run(words, env=variables, timeout=240, stdout=file, stderr=file, check=False)
        return ended.returncode, log.read_text()[-3000:]

    def kill_at(self, point: Point) -> None:
        code, output = self.start([point])
        assert code == (-9 if point[2] == "driver" else 2), f"{point}: {output}"

    def finish(self, points: Sequence[Point] = ()) -> None:
        code, output = self.start(points)
        assert code == 0, output


def assert_every_prompt_once(out: Path) -> list[list[dict[str, Any]]]:
    groups = transcripts(out, STEPS)
    size = len(groups[0])
    assert [[group["index"] for group in step] for step in groups] == [
        list(range(size * step, size * (step + 1))) for step in range(STEPS)
    ]
    assert sorted(read_metrics(out)) == list(range(1, STEPS + 1))
    return groups


def assert_same_run(expected: Path, actual: Path) -> None:
    """Check that both runs sampled the same tokens, and learnt the same from them."""
    for one, other in zip(assert_every_prompt_once(expected), assert_every_prompt_once(actual), strict=True):
        for group, same in zip(one, other, strict=True):
            assert [r["text"] for r in group["responses"]] == [r["text"] for r in same["responses"]], group["index"]
    for step, metrics in read_metrics(expected).items():
        assert metrics["policy/grad_norm"] > 0.0, "the weights do not change"
        for name in ("reward/mean", "policy/loss", "policy/grad_norm", "is/mean", "async/staleness_mean"):
            assert read_metrics(actual)[step][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5), (step, name)


def points(run: int, durations: dict[str, float]) -> list[Point]:
    """Return where to kill a run: once in each phase, in steps 2 to 6. Over all runs the times are spread over the
    phases, and each phase is interrupted in both processes."""
    share = (run + 0.5) / RUNS
    return [
        (2 + number, phase, ("driver", "actor")[(run + number) % 2], share * durations[phase])
        for number, phase in enumerate(PHASES)
    ]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check at the end that all processes of all runs have ended: Ray's agents do so within a minute."""
    yield
    assert_nothing_is_left(f"VLMRL_TEST_RUN={MARK}", within_s=150)


@pytest.fixture(scope="module")
def start(tiny_model: Callable[..., str], digits_reward: str) -> tuple[str, str]:
    """Model and reward of all runs."""
    return tiny_model("qwen2_5_vl", size="micro"), digits_reward


@pytest.fixture(scope="module")
def unbroken(start: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unbroken run."""
    runs = Runs(start, tmp_path_factory.mktemp("unbroken") / "run")
    runs.finish()
    return runs.out


@pytest.fixture(scope="module")
def durations(unbroken: Path) -> dict[str, float]:
    """Mean seconds of each phase, after the first step."""
    steps = [metrics for step, metrics in read_metrics(unbroken).items() if step > 1]
    return {phase: sum(m[f"time/{phase}_s"] for m in steps) / len(steps) for phase in PHASES}


@pytest.mark.timeout(600)
def test_an_empty_queue_is_a_synchronous_run_to_the_bit(start: tuple[str, str], tmp_path: Path) -> None:
    in_turn = Runs(start, tmp_path / "in_turn", **{"train.async_enable": "false"})
    empty = Runs(start, tmp_path / "empty", **{"train.async_queue_size": "0"})
    for runs in (in_turn, empty):
        runs.finish()
    assert transcripts(in_turn.out, STEPS) == transcripts(empty.out, STEPS)
    expected, actual = read_metrics(in_turn.out), read_metrics(empty.out)
    for step in range(1, STEPS + 1):
        names = [name for name in expected[step] if not name.startswith("throughput/") and not name.endswith("_s")]
        assert {"reward/mean", "policy/loss", "sync/logprob_diff_max"} <= set(names)
        assert expected[step]["policy/grad_norm"] > 0.0, "the weights do not change"
        # The engine scores responses in the order in which they reach it, which decides how it rounds.
        rounded = {name for name in names if name.startswith("verify/images/engine_")}
        assert {n: actual[step][n] for n in names if n not in rounded} == {
            n: expected[step][n] for n in names if n not in rounded
        }, step
        assert {n: actual[step][n] for n in rounded} == pytest.approx({n: expected[step][n] for n in rounded}, abs=1e-6)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", range(RUNS))
def test_a_run_killed_in_every_phase_goes_on_with_the_same_tokens(
    run: int, start: tuple[str, str], unbroken: Path, durations: dict[str, float], tmp_path: Path
) -> None:
    runs = Runs(start, tmp_path / "broken")
    for point in points(run, durations):
        runs.kill_at(point)
    runs.finish()
    assert_same_run(unbroken, runs.out)


@pytest.mark.timeout(900)
def test_a_run_with_partial_rollouts_killed_in_every_phase_trains_on_every_prompt_once(
    start: tuple[str, str], durations: dict[str, float], tmp_path: Path
) -> None:
    runs = Runs(start, tmp_path / "broken", **PARTIAL)
    for point in points(1, durations | {"settle": 0.0}):
        if point[1] != "settle":  # it does not wait
            runs.kill_at(point)
    runs.finish()
    assert_every_prompt_once(runs.out)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [{}, PARTIAL, {"train.async_enable": "false"}], ids=["ahead", "partial", "in_turn"])
def test_a_run_whose_engine_is_killed_goes_on_by_itself(
    flags: dict[str, str], start: tuple[str, str], durations: dict[str, float], tmp_path: Path
) -> None:
    runs = Runs(start, tmp_path / "broken", **flags)
    runs.finish(
        [
            (2, "rollout", "core", 0.0),
            (3, "update", "vllm", 0.5 * durations["update"]),
            (5, "sync", "core", 0.5 * durations["sync"]),
        ]
    )
    assert read_metrics(runs.out)[STEPS]["cluster/engine_restarts"] == 3
    assert_every_prompt_once(runs.out)
