"""The form of the rows of `vlmrl.observe.registry`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal["", "fraction", "count", "tokens", "s", "nats", "bytes", "tokens/s"]
"""`nats`: differences and sums of log-probs, KL, entropy. An empty unit is a plain number, such as a reward."""
Better = Literal["higher", "lower"]


class MetricInfo(NamedTuple):
    """What a metric is, and which values deserve attention.

    Example: MetricInfo("reward/failed", "count", "responses that could not be scored", "lower").
    """

    name: str
    """A name, or a pattern with placeholders: `eval/<set>/pass@<k>`."""
    unit: Unit
    meaning: str
    """A phrase of plain text; names and settings are in backticks."""
    better: Better | None = None
    """None where neither direction is good by itself."""
    warn_below: float | None = None
    warn_above: float | None = None
    warning: str = ""
    """What a value beyond a bound means, and what to do."""
    guide: str = ""
    """The page with more, relative to this folder."""
    group: str = ""
    """Title of the metric's group; the registry sets it."""

    def is_suspicious(self, value: float) -> bool:
        """Whether the value is beyond a bound; NaN is not."""
        below = self.warn_below is not None and value < self.warn_below
        return below or (self.warn_above is not None and value > self.warn_above)


class MetricGroup(NamedTuple):
    """Metrics that are shown together."""

    title: str
    rows: tuple[MetricInfo, ...]
