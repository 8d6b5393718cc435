"""Look up what a metric is: unit, meaning, group, and the values that deserve attention.

`vlmrl.observe.metric_rows` holds the rows. The tables of README.md, the hints of reports and the axes of curves come
from them.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import NamedTuple

from vlmrl.observe.metric_info import MetricInfo
from vlmrl.observe.metric_rows import GROUPS

_PLACEHOLDER = re.compile(r"<\w+>")


class _Bound(NamedTuple):
    warning: str
    above: float | None = None
    below: float | None = None


_TRUNCATED = _Bound("raise `rollout.max_new_tokens`, or penalize length", above=0.25)
_LARGE_UPDATES = "updates are large: a lower learning rate, or fewer optimizer steps per step"
_BOUNDS = {
    "reward/failed_infrastructure": _Bound("a reward server or process failed, see `logs/rewards.log`", above=0),
    "group/constant_fraction": _Bound("few prompts teach: they are too easy or too hard for this model", above=0.8),
    "response/truncated_fraction": _TRUNCATED,
    "filter/kept_fraction": _Bound(
        "most responses are sampled in vain: the prompts are too easy or too hard", below=0.2
    ),
    "agent/failed": _Bound("an environment fails again and again, see `logs/agents.log`", above=0),
    "eval/<set>/truncated_fraction": _TRUNCATED,
    "policy/entropy": _Bound("the responses to a prompt are nearly the same", below=0.01),
    "policy/clip_fraction": _Bound(_LARGE_UPDATES, above=0.4),
    "policy/kl_old": _Bound(_LARGE_UPDATES, above=0.2),
    "is/ess": _Bound("few tokens carry the update: engine and trainer, or their versions, are far apart", below=0.5),
    "value/explained_variance": _Bound("the critic is worse than a constant, as it may be in the first steps", below=0),
    "generate/truncated_fraction": _TRUNCATED,
    "cluster/engine_restarts": _Bound("an engine died, see `logs/run.log`", above=0),
    "sync/logprob_diff_mean": _Bound("responses are sampled from another function than is trained", above=0.1),
    "data/rows_dropped": _Bound("the run printed which rows, and why", above=0),
}
"""Values that deserve attention in most runs. What must not be at all ends a run (`vlmrl.verify`), and is not here."""


@cache
def metrics() -> tuple[MetricInfo, ...]:
    """Return all metrics, group by group, in the order in which they are shown."""
    return tuple(_complete(row, group.title) for group in GROUPS for row in group.rows)


def group_titles() -> list[str]:
    """Return the titles of all groups in the order in which they are shown."""
    return [group.title for group in GROUPS]


@lru_cache(maxsize=4096)
def describe(name: str) -> MetricInfo | None:
    """Return what a metric is; None for one that is not registered.

    Examples: eval/math/pass@4 is described by `eval/<set>/pass@<k>`, and eval/math/count/pass@1 by
    `eval/<set>/<value>/pass@1`.
    """
    matches = (info for pattern in ("[^/]+", ".+") for info, text in _patterns(pattern) if text.fullmatch(name))
    return next(matches, None)


def guide_table(title: str) -> str:
    """Return the metrics of a group as the table in Markdown that README.md holds.

    Raises:
        ValueError: there is no such group.
    """
    if title not in group_titles():
        raise ValueError(f"no group of metrics {title!r}; there are: {', '.join(group_titles())}")
    lines = ["| metric | unit | better | meaning |", "|---|---|---|---|"]
    for info in metrics():
        if info.group == title:
            cells = (f"`{info.name}`", info.unit, info.better or "", _guide_text(info))
            lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines)


def _complete(row: MetricInfo, group: str) -> MetricInfo:
    bound = _BOUNDS.get(row.name, _Bound(""))
    return row._replace(group=group, warning=bound.warning, warn_above=bound.above, warn_below=bound.below)


@cache
def _patterns(placeholder: str) -> list[tuple[MetricInfo, re.Pattern[str]]]:
    """Each metric with the pattern of its name. `[^/]+` for placeholders comes first: only if nothing fits may the name
    of a set or source hold slashes, as in eval/org/math/reward."""
    return [
        (info, re.compile(placeholder.join(re.escape(part) for part in _PLACEHOLDER.split(info.name))))
        for info in metrics()
    ]


def _guide_text(info: MetricInfo) -> str:
    text = f"{info.meaning} ([more]({info.guide}))" if info.guide else info.meaning
    for side, bound in (("above", info.warn_above), ("below", info.warn_below)):
        if bound is not None:
            text += f". **{side.capitalize()} {bound:g}**: {info.warning}"
    return text
