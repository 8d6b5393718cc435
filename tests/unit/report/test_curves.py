from __future__ import annotations

import math

from vlmrl.report.curves import curves


def test_a_curve_holds_the_steps_in_which_the_metric_is_a_number() -> None:
    records = [{"step": 0, "a/x": 1.0}, {"step": 1, "a/x": None, "b/y": 2.5}, {"step": 2, "a/x": math.nan, "b/y": 3}]
    assert curves(records, max_points=10) == {"a/x": ([0], [1]), "b/y": ([1, 2], [2.5, 3])}


def test_thinning_keeps_spikes_and_both_ends() -> None:
    values = [0.5] * 10_000
    values[1234], values[7777], values[0], values[-1] = 9.0, -9.0, 0.25, 0.75
    (curve,) = curves([{"step": s, "a/x": v} for s, v in enumerate(values)], max_points=100).values()
    assert len(curve.steps) <= 102
    assert {(0, 0.25), (1234, 9), (7777, -9), (9999, 0.75)} <= set(zip(curve.steps, curve.values, strict=True))
    assert curve.steps == sorted(curve.steps)


def test_values_have_five_digits() -> None:
    (curve,) = curves([{"step": 1, "a/x": 1 / 3}, {"step": 2, "a/x": 12345678.0}], max_points=10).values()
    assert curve.values == [0.33333, 12346000]
