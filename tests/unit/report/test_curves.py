from __future__ import annotations

import math

from vlmrl.report.curves import curves


def test_a_curve_holds_the_steps_in_which_the_metric_is_a_number() -> None:
    records = [{"step": 0, "a/x": 1.0}, {"step": 1, "a/x": None, "b/y": 2.5}, {"step": 2, "a/x": math.nan, "b/y": 3}]
    assert curves(records, max_points=10) == {"a/x": ([0], [1], [], []), "b/y": ([1, 2], [2.5, 3], [], [])}


def test_a_long_curve_keeps_its_spikes_and_both_ends() -> None:
    values = [0.5] * 10_000
    values[1234], values[7777], values[0], values[-1] = 9.0, -9.0, 0.25, 0.75
    (curve,) = curves([{"step": s, "a/x": v} for s, v in enumerate(values)], max_points=100).values()
    assert 45 <= len(curve.steps) <= 50
    assert curve.steps == sorted(set(curve.steps))
    assert [(curve.steps[i], curve.values[i], curve.lows[i], curve.highs[i]) for i in (0, -1)] == [
        (0, 0.25, 0.25, 0.25),
        (9999, 0.75, 0.75, 0.75),
    ]
    width = 10_000 / 47
    for step, column in ((1234, curve.highs), (7777, curve.lows)):
        (place,) = [i for i, value in enumerate(column) if abs(value) == 9]
        assert abs(curve.steps[place] - step) < width


def test_the_mean_of_a_spiky_curve_stays_what_it_is() -> None:
    # One value in ten is 1, the others 0: minimum and maximum of a stretch have a mean of 0.5.
    records = [{"step": step, "a/x": float(step % 10 == 7)} for step in range(5000)]
    (curve,) = curves(records, max_points=1000).values()
    assert abs(sum(curve.values) / len(curve.values) - 0.1) < 0.005
    assert set(curve.highs[1:-1]) == {1}
    assert set(curve.lows) == {0}


def test_stretches_are_means_of_their_steps() -> None:
    # Between both ends, eight steps in two stretches of four: (1 + 2 + 3 + 4) / 4 and (5 + 6 + 7 + 8) / 4.
    (curve,) = curves([{"step": 10 * i, "a/x": i} for i in range(10)], max_points=8).values()
    assert curve == ([0, 20, 60, 90], [0, 2.5, 6.5, 9], [0, 1, 5, 9], [0, 4, 8, 9])


def test_values_have_five_digits() -> None:
    (curve,) = curves([{"step": 1, "a/x": 1 / 3}, {"step": 2, "a/x": 12345678.0}], max_points=10).values()
    assert curve.values == [0.33333, 12346000]
