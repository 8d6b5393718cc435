"""How far a tracker has a run, over its resumes: it cannot give back what it has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from vlmrl.errors import ConfigError
from vlmrl.system.plain_text import one_line


class Sent:
    """The last step that was sent, with its metrics, in a file of the run's folder. Steps are sent in order."""

    def __init__(self, file: Path, *, resumes: bool) -> None:
        self._file = file
        self._before: tuple[int, frozenset[str]] = (-1, frozenset())
        if resumes and file.exists():
            self._before = _read(file)
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


def _read(file: Path) -> tuple[int, frozenset[str]]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return int(known["step"]), frozenset(known["metrics"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # a disk has damaged it
        raise ConfigError(
            f"{file} cannot be read: {one_line(error, max_chars=100)}; delete it: the tracker may then get metrics of "
            "some steps twice"
        ) from error
