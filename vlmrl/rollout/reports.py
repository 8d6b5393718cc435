"""What an engine and its workers tell each other of an update, and what the workers' reports say was wrong with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict

from vlmrl.models.adapter_plan import AdapterPlan

_DIGITS = 1e-3
"""A factor is told apart from a whole number by more than this."""


class Announcement(TypedDict):
    """What an adapter will be, said before its tensors come: plain values, so that any RPC carries it."""

    names: list[str]
    rank: int
    alpha: float
    is_rank_stabilized: bool
    scaling: float
    """What the layers must multiply B @ A by; vLLM finds its own number from the three above."""


class ReadbackPlan(TypedDict):
    """Which layers of the engines are read back after an update of the model, and by which of their columns."""

    seed: int
    """Another with each sync; the same for all engines and workers."""
    is_full: bool
    """All layers, or a sample of them."""


class ReadbackReport(TypedDict):
    """What one worker read back from its layers."""

    layers: int
    """How many were read."""
    unread: list[str]
    """Tensors whose layers cannot be read: a loader changed them, or the layer holds them in a form of its own."""
    wrong: list[list[str]]
    """Tensors that the layers do not hold, each with what they hold instead."""
    seconds: float
    """That reading and comparing took, the share that was taken while the weights came included."""


class Report(TypedDict):
    """What one worker says of an update of the whole model."""

    digests: dict[str, str]
    """Name -> digest of every tensor that came."""
    ignored: list[str]
    """Names that vLLM's model has no place for."""
    missing: list[str]
    """What got no tensor, or too little of one."""
    readback: NotRequired[ReadbackReport]
    """Where it was asked for, and the update is otherwise whole."""


class AdapterReport(Report):
    """What one worker says of an adapter, having read its layers."""

    unknown: list[str]
    """Names that came and were not announced."""
    is_active: bool
    """vLLM would use what the layers hold."""
    factor: float
    """Every B of the layers is this many times what was sent, times the announced scaling: 1, or something is wrong."""
    empty: list[str]
    """Matrices that are zero in the layers, and were not sent so."""
    older: list[str]
    """Matrices that are in the layers what they were before the update, and were sent otherwise."""
    other: list[str]
    """Matrices that are something else again."""


class HeldAdapter(NamedTuple):
    """The adapter that the layers of an engine hold."""

    version: int
    fingerprint: str
    """`adapter_fingerprint` of what was read back from them."""


def announcement(plan: AdapterPlan) -> Announcement:
    return {
        "names": list(plan.tensor_names),
        "rank": plan.rank,
        "alpha": plan.alpha,
        "is_rank_stabilized": plan.is_rank_stabilized,
        "scaling": plan.scaling,
    }


def problem_of(reports: Sequence[Report]) -> str | None:
    """What was wrong with an update, by the workers' reports; None when it was complete on all of them."""
    for report in reports:
        if report["ignored"]:
            return f"vLLM's model has no place for {_some(report['ignored'])}"
        if report["missing"]:
            return f"no weights came for {_some(report['missing'])}"
        if report["digests"] != reports[0]["digests"]:
            return "its workers received different weights"
    return problem_of_layers(reports)


def problem_of_layers(reports: Sequence[Report]) -> str | None:
    """What the layers were found to hold instead of what came; None when nothing was found."""
    for worker, report in enumerate(reports):
        wrong = report["readback"]["wrong"] if "readback" in report else []
        if wrong:
            where = f" of worker {worker}" if len(reports) > 1 else ""
            more = f", and {len(wrong) - 1} more are not as sent" if len(wrong) > 1 else ""
            name, said = wrong[0]
            return f"read back from the layers{where}, {name} {said}{more}"
    return None


def problem_of_adapter(reports: Sequence[AdapterReport], scaling: float) -> str | None:
    """What was wrong with an adapter that should count `scaling` times; None when every worker's layers hold it."""
    for report in reports:
        if report["unknown"]:
            return f"its adapter has no {_some(report['unknown'])}"
    problem = problem_of(reports)
    if problem is not None:
        return problem
    for report in reports:
        if not report["is_active"]:
            return "vLLM ignores the adapter: it did not switch it on"
        found = [
            f"{what} {_some(names)}"
            for what, names in (
                ("nothing of", report["empty"]),
                ("still the older", report["older"]),
                ("something else than was sent for", report["other"]),
            )
            if names
        ]
        if found:
            return f"vLLM's layers hold {', and '.join(found)}"
        factor = report["factor"]
        if factor != 1:
            times = round(factor)
            what = f"{times} times" if times > 1 and math.isclose(factor, times, rel_tol=_DIGITS) else "wrongly scaled"
            return f"vLLM's layers apply the adapter {what}: by {factor * scaling:.4g} instead of {scaling:.4g}"
    return None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
