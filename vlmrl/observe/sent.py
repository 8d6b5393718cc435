"""How far a tracker has a run, over its resumes: it cannot give back what it has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


class Sent:
    """The last step that was sent, with its metrics, in a file of the run's folder. Steps are sent in order."""

    def __init__(self, file: Path, *, resumes: bool) -> None:
        self._file = file
        self._before: tuple[int, frozenset[str]] = (-1, frozenset())
        if resumes and file.exists():
            known = json.loads(file.read_text(encoding="utf-8"))
            self._before = known["step"], frozenset(known["metrics"])
        self._now = self._before

    def earlier(self, step: int) -> frozenset[str] | None:
        """Return the metrics of a step that earlier processes of the run sent; None: all of them."""
        last, metrics = self._before
        if step == last:
            return metrics
        return None if step < last else frozenset()

    def note(self, step: int, metrics: Iterable[str]) -> None:
        """Note that metrics of a step were sent. Raises OSError."""
        last, before = self._now
        if step < last:
            return
        self._now = step, frozenset(metrics) | (before if step == last else frozenset())
        partial = self._file.with_suffix(".tmp")
        partial.write_text(json.dumps({"step": step, "metrics": sorted(self._now[1])}) + "\n", encoding="utf-8")
        partial.replace(self._file)
