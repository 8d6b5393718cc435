"""Rates that fit measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmrl.plan.rates import Kind, Rates, Unit
from vlmrl.plan.step import Step

_RIDGE = 3e-4
"""Weight of the initial rates, against that of one measured run."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run: what its steps compute, and how long they took."""

    step: Step
    seconds: dict[str, float]
    """Phase -> seconds."""


def fitted(runs: Sequence[Measured], initial: Rates) -> Rates:
    """Fit the rates of each phase to measured seconds, in relative terms.

    First all rates of a phase are scaled by one factor, which is all that one run can tell. Then each may differ, as
    far as several runs demand it: ridge regression with non-negative rates.
    """
    rates = dict(initial)
    for name in {phase.name for run in runs for phase in run.step.phases}:
        rows: list[tuple[dict[tuple[Kind, Unit], float], float]] = []
        for run in runs:
            phase = next((phase for phase in run.step.phases if phase.name == name), None)
            if phase is None or run.seconds.get(name, 0.0) <= 0.0:
                continue
            row: dict[tuple[Kind, Unit], float] = {}
            for part in phase.parts:
                for unit, amount in part.work.items():
                    key = (part.kind, unit)
                    row[key] = row.get(key, 0.0) + amount * initial.get(key, 0.0)
            if sum(row.values()) > 0:
                rows.append((row, run.seconds[name]))
        if rows:
            rates |= {key: initial[key] * factor for key, factor in _factors(rows).items()}
    return rates


def _factors(rows: Sequence[tuple[dict[tuple[Kind, Unit], float], float]]) -> dict[tuple[Kind, Unit], float]:
    """Return the factor of each rate, for rows of predicted seconds by rate with the measured seconds."""
    shares = [{key: predicted / measured for key, predicted in row.items()} for row, measured in rows]
    totals = [sum(share.values()) for share in shares]
    scale = sum(totals) / sum(total * total for total in totals)
    keys = sorted({key for share in shares for key, value in share.items() if value > 0})
    factors = dict.fromkeys(keys, scale)
    ridge = _RIDGE / scale**2
    residuals = [sum(share.get(key, 0.0) * scale for key in keys) - 1 for share in shares]
    for _ in range(2000):
        for key in keys:
            column = [share.get(key, 0.0) for share in shares]
            gradient = sum(a * r for a, r in zip(column, residuals, strict=True)) + ridge * (factors[key] - scale)
            changed = max(0.0, factors[key] - gradient / (sum(a * a for a in column) + ridge))
            moved, factors[key] = changed - factors[key], changed
            residuals = [r + a * moved for a, r in zip(column, residuals, strict=True)]
    return factors
