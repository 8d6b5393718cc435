"""Engines that have died: which they are, and starting them again, within bounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.errors import EngineLossError, VlmrlError
from vlmrl.system import stops

if TYPE_CHECKING:
    from vlmrl.rollout.engine import RolloutEngine


class EngineRestarts:
    """Starts engines again that have died, `vllm.max_restarts` times at most.

    An engine that died has no weights after its start. Until `have_weights`, it is not `usable`.
    """

    def __init__(
        self,
        workers: WorkerGroup[RolloutEngine],
        *,
        limit: int = 0,
        obstacle: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """`obstacle`: the reason why engines cannot be started again during this run; None without one."""
        self._workers, self._say = workers, say
        self._limit, self._obstacle = limit, obstacle
        self.count = 0
        """How many engines have been started again."""
        self._dead: dict[int, str] = {}
        """Number of an engine -> line about its death."""
        self._without_weights: set[int] = set()
        self._incarnations = [0] * len(workers)
        self._lock = threading.Lock()

    @property
    def is_needed(self) -> bool:
        """Whether an engine has died and does not have the weights again."""
        return bool(self._dead or self._without_weights)

    @property
    def usable(self) -> list[int]:
        """Numbers of the engines that live and have weights."""
        return [n for n in range(len(self._workers)) if n not in self._dead and n not in self._without_weights]

    def incarnation(self, engine: int) -> int:
        """How often this engine has lost all that it had under way."""
        return self._incarnations[engine]

    def is_lost(self, engine: int, incarnation: int) -> bool:
        """Whether an engine has lost what it had under way in this incarnation, as far as is known."""
        return engine in self._dead or self._incarnations[engine] != incarnation

    def find_dead(self) -> list[int]:
        """Search for engines that have died; return the numbers of all that are dead now."""
        with self._lock:
            self._dead |= self._workers.find_dead(lambda engine: engine.check())
            return list(self._dead)

    def start(self) -> bool:
        """Start the dead engines again; return whether there were any.

        Raises:
            EngineLossError: it is not possible, or not allowed once more.
        """
        with self._lock:
            any_dead = bool(self._dead)
            while self._dead:
                self._check_allowed()
                self.count += len(self._dead)
                self._try_to_start(list(self._dead))
            return any_dead

    def _check_allowed(self) -> None:
        line = "; ".join(self._dead.values())
        if stops.is_stopping():
            raise EngineLossError(f"{line}; it is not started again, because the run is stopping")
        if self._obstacle is not None:
            raise EngineLossError(f"{line}; {self._obstacle}")
        if self.count + len(self._dead) > self._limit:
            restarts = f"{self.count} restarts" if self.count != 1 else "1 restart"
            raise EngineLossError(f"{line}; this came after {restarts} (vllm.max_restarts {self._limit})")

    def _try_to_start(self, dead: Sequence[int]) -> None:
        for line in self._dead.values():
            self._say(f"{line}; it is started again ({self.count} of vllm.max_restarts {self._limit})")
        try:
            self._workers.replace(dead, lambda engine: engine.shutdown())
            self._workers.wait([self._workers.submit_to(number, lambda engine: engine.start()) for number in dead])
        except VlmrlError as error:  # also those of users' files, which may have been edited during the run
            self._dead = dict.fromkeys(dead, str(error))
            return
        self.abandon(dead)
        self._dead = {}

    def abandon(self, engines: Sequence[int]) -> None:
        """Note that these engines have lost what they had under way, and have no weights."""
        for number in engines:
            self._incarnations[number] += 1
        self._without_weights.update(engines)

    def have_weights(self) -> None:
        """Note that all engines hold the current weights."""
        self._without_weights.clear()
