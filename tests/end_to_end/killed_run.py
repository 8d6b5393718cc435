"""`python killed_run.py POINTS rl ...`: `vlmrl` that kills one of its processes at given points.

POINTS is a JSON list of [step, phase, process, seconds after the phase begins]. The process is `driver`, or the name of
a role for its last worker, or `core` for the engine's own process below that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

from processes import engine_core

from vlmrl.cli import main
from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.commands import run
from vlmrl.observe.report import RunReport


def kill_at(points: list[tuple[int, str, str, float]]) -> None:
    groups: dict[str, WorkerGroup[Any]] = {}

    class Builder(RoleBuilder):
        def group(self, name: str, *given: Any, **options: Any) -> WorkerGroup[Any]:
            groups[name] = super().group(name, *given, **options)
            return groups[name]

    def kill(who: str) -> None:
        if who == "driver":
            os.kill(os.getpid(), signal.SIGKILL)
        worker = groups["vllm" if who == "core" else who].pids[-1]
        os.kill(engine_core(worker).pid if who == "core" else worker, signal.SIGKILL)

    class Report(RunReport):
        unfinished = 0
        """The step that has not been reported."""

        def begin(self, *, total_steps: int, done: int) -> None:
            super().begin(total_steps=total_steps, done=done)
            self.unfinished = done + 1

        def step(self, step: int, metrics: dict[str, float]) -> None:
            super().step(step, metrics)
            self.unfinished = step + 1

        def phase(self, name: str) -> AbstractContextManager[None]:
            for step, phase, who, delay_s in points:
                if (step, phase) == (self.unfinished, name):
                    points.remove((step, phase, who, delay_s))
                    timer = threading.Timer(delay_s, kill, [who])
                    timer.daemon = True
                    timer.start()
            return super().phase(name)

    run.RoleBuilder, run.RunReport = Builder, Report  # type: ignore[misc]


if __name__ == "__main__":
    kill_at([tuple(point) for point in json.loads(sys.argv.pop(1))])
    main()
