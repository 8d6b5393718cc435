"""Messages between an engine and its workers about an update, and the problems found in the workers' reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict

from vlmrl.models.adapter_plan import AdapterPlan

_INTEGER_TOLERANCE = 1e-3
"""A factor this close to an integer is reported as that integer."""


class AdapterDescription(TypedDict):
    """Names and scaling of an adapter, sent before its tensors. Plain values, so that any RPC can carry it."""

    names: list[str]
    rank: int
    alpha: float
    is_rank_stabilized: bool
    scaling: float
    """The factor of B @ A in the layers; vLLM computes its own from the three fields above."""


class ReadbackPlan(TypedDict):
    """Layers of the engines that are read back after an update of the model, and the seed of the columns."""

    seed: int
    """Different for each sync; the same for all engines and workers."""
    is_full: bool
    """All layers, or a sample of them."""


class ReadbackReport(TypedDict):
    """Report of one worker on the layers that it read back."""

    layers: int
    """Number of layers that were read."""
    unread: list[str]
    """Tensors that cannot be read back: a loader changed them, or the layer holds them in another format."""
    wrong: list[list[str]]
    """Tensors that the layers do not hold as sent, each with a description of what they hold."""
    seconds: float
    """Time of reading and comparing, including the part during the transfer of the weights."""


class Report(TypedDict):
    """Report of one worker on an update of the model."""

    digests: dict[str, str]
    """Name -> digest of each received tensor."""
    ignored: list[str]
    """Names that vLLM's model did not load. A stage of a pipeline (`vllm.pipeline_parallel_size`) has a part of the
    layers."""
    missing: list[str]
    """Modules without a tensor, or with an incomplete one."""
    stage: NotRequired[int]
    """Of the pipeline, from 0; absent for whole models and adapters."""
    readback: NotRequired[ReadbackReport]
    """Present if it was requested and the update is otherwise complete."""


class AdapterReport(Report):
    """Report of one worker on an adapter, read from its layers."""

    unknown: list[str]
    """Received names that are not in the description."""
    is_active: bool
    """vLLM has activated the adapter."""
    factor: float
    """Each B in the layers, divided by the one that was sent times the described scaling. Anything but 1 is an
    error."""
    empty: list[str]
    """Matrices that are zero in the layers, but were not sent as zero."""
    older: list[str]
    """Matrices that did not change in the layers, but were sent with changes."""
    other: list[str]
    """Matrices with any other difference."""


class HeldAdapter(NamedTuple):
    """The adapter that the layers of an engine hold."""

    version: int
    fingerprint: str
    """`adapter_fingerprint` of what was read back from them."""


def describe_adapter(plan: AdapterPlan) -> AdapterDescription:
    """Return the description of the planned adapter."""
    return {
        "names": list(plan.tensor_names),
        "rank": plan.rank,
        "alpha": plan.alpha,
        "is_rank_stabilized": plan.is_rank_stabilized,
        "scaling": plan.scaling,
    }


def find_problem(reports: Sequence[Report]) -> str | None:
    """Return the first problem in the workers' reports of an update; None when it was complete on all of them."""
    ignored = ignored_by_all_stages(reports)
    if ignored:
        return f"vLLM's model has no place for {_some(ignored)}"
    for report in reports:
        if report["missing"]:
            return f"no weights arrived for {_some(report['missing'])}"
        if report["digests"] != reports[0]["digests"]:
            return "its workers received different weights"
    return find_readback_problem(reports)


def ignored_by_all_stages(reports: Sequence[Report]) -> list[str]:
    """Return the tensors that no stage of the pipeline has loaded on all of its workers.

    A stage that has the layer but did not load the tensor has `missing` elements.
    """
    by_stage: dict[int, set[str]] = {}
    for report in reports:
        by_stage.setdefault(report.get("stage", 0), set()).update(report["ignored"])
    return sorted(set.intersection(*by_stage.values()))


def find_readback_problem(reports: Sequence[Report]) -> str | None:
    """Return the first tensor that the layers do not hold as sent; None when there is none."""
    for worker, report in enumerate(reports):
        wrong = report["readback"]["wrong"] if "readback" in report else []
        if wrong:
            where = f" of worker {worker}" if len(reports) > 1 else ""
            more = f", and {len(wrong) - 1} more are not as sent" if len(wrong) > 1 else ""
            name, mismatch = wrong[0]
            return f"read back from the layers{where}, {name} {mismatch}{more}"
    return None


def find_adapter_problem(reports: Sequence[AdapterReport], scaling: float) -> str | None:
    """Return the first problem of an adapter with this scaling; None when all workers' layers hold it."""
    for report in reports:
        if report["unknown"]:
            return f"its adapter has no {_some(report['unknown'])}"
    problem = find_problem(reports)
    if problem is not None:
        return problem
    for report in reports:
        if not report["is_active"]:
            return "vLLM did not activate the adapter"
        differences = [
            f"{kind} {_some(names)}"
            for kind, names in (
                ("nothing of", report["empty"]),
                ("still the older", report["older"]),
                ("something else than was sent for", report["other"]),
            )
            if names
        ]
        if differences:
            return f"vLLM's layers hold {', and '.join(differences)}"
        factor = report["factor"]
        if factor != 1:
            times = round(factor)
            scale = (
                f"{times} times"
                if times > 1 and math.isclose(factor, times, rel_tol=_INTEGER_TOLERANCE)
                else "wrongly scaled"
            )
            return f"vLLM's layers apply the adapter {scale}: by {factor * scaling:.4g} instead of {scaling:.4g}"
    return None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
