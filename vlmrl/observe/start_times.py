"""Measure the phases of a run's start, from the start of this process."""

from __future__ import annotations

import time

import psutil

from vlmrl.types import Metrics


class StartTimes:
    """Seconds of each phase of the start: `time/start/<phase>_s`."""

    def __init__(self) -> None:
        self._end = psutil.Process().create_time()
        self._times: Metrics = {}

    def end(self, phase: str) -> None:
        """End a phase. It began when the previous one ended, the first with the process."""
        now = time.time()
        self._times[f"time/start/{phase}_s"] = now - self._end
        self._end = now

    def take(self) -> Metrics:
        """Return the times once; afterwards nothing."""
        times, self._times = self._times, {}
        return times
