"""The arithmetic of `vlmrl bench async`, by hand."""

from __future__ import annotations

import pytest

from vlmrl.commands.bench.speedup import SYNCHRONOUS, Mode, Seconds, averaged, bound, modes, results, warm_up

PARTIAL = Mode(1, partial=True)


def test_a_round_has_each_queue_size_with_and_without_partial_rollouts() -> None:
    assert [(mode.name, mode.queue) for mode in modes((1, 2))] == [
        ("synchronous", 0),
        ("drained", 1),
        ("partial", 1),
        ("drained", 2),
        ("partial", 2),
    ]


@pytest.mark.parametrize(
    ("rollout_s", "update_s", "queue", "expected"),
    [
        (3.0, 1.0, 1, 2.0),  # a step of 4 s, and two batches under way
        (3.0, 1.0, 2, 3.0),
        (3.0, 1.0, 3, 4.0),
        (3.0, 1.0, 9, 4.0),  # the trainer is always busy
        (0.5, 1.0, 1, 1.5),
        (3.0, 1.0, 0, 1.0),
    ],
)
def test_a_step_takes_its_update_or_its_share_of_the_batches_under_way(
    rollout_s: float, update_s: float, queue: int, expected: float
) -> None:
    assert bound(rollout_s, update_s, queue) == pytest.approx(expected)


def test_averages_leave_out_the_first_steps_and_those_behind_which_nothing_is_sampled() -> None:
    steps = [{"time/step_s": seconds} for seconds in (9.0, 9.0, 9.0, 3.0, 1.0, 3.0, 1.0, 0.5)]
    assert averaged(steps, first=warm_up((1,)), queue=1) == {"time/step_s": 2.0}
    # None is left out at the end of a synchronous run.
    assert averaged(steps[:5], first=3, queue=0) == {"time/step_s": 2.0}
    assert warm_up((1, 2)) == 4


def test_a_metric_that_only_some_steps_have_is_averaged_over_all() -> None:
    steps = [{"time/step_s": 1.0}] * 2 + [{"time/step_s": 1.0, "verify/noise/level": 0.3}] + [{"time/step_s": 1.0}] * 2
    assert averaged(steps, first=2, queue=0) == {"time/step_s": 1.0, "verify/noise/level": pytest.approx(0.1)}


def test_results_compare_medians_of_the_rounds() -> None:
    # Synchronous: 4 s, of which 3 s are rollouts; one round was disturbed.
    rounds = {
        SYNCHRONOUS: [Seconds(4.0, 3.0), Seconds(9.0, 3.5), Seconds(4.0, 3.0)],
        PARTIAL: [Seconds(2.5, 0.0), Seconds(2.4, 0.0), Seconds(7.0, 0.0)],
    }
    of_mode = results(rounds)
    assert of_mode[SYNCHRONOUS] == (4.0, 1.0, 1.0)
    assert of_mode[PARTIAL] == (2.5, pytest.approx(1.6), 2.0)
    assert of_mode[PARTIAL].reached == pytest.approx(0.8)
