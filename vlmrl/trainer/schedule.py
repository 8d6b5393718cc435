"""Which prompts may have responses sampled ahead of training, and the order in which steps take them.

No threads, engines or clocks: `trainer/ahead.py` has those.
"""

from __future__ import annotations

from typing import Generic, TypeVar

_Group = TypeVar("_Group")


class Schedule(Generic[_Group]):
    """Groups by the position of their prompts, of which steps take one after the other.

    A group may start while its position is below `limit = taken + missing + Q * batch`, where `missing` is how many
    groups the current step lacks. With `filtered` groups that were taken but not trained on, this is
    `(version + 1 + Q) * batch + filtered`, so a step trains on no token older than Q versions: a group at `limit` has
    Q whole batches before it, besides the current one. A step waits for the groups that it lacks, however long they
    take; nothing is dropped for its age.

    Example, batches of 2 and Q = 1: groups 0 to 3 start at version 0. Step 1 takes 0 and 1 and filters 1, so that it
    lacks one: group 4 may start. It takes 2. After the sync of version 1, groups 5 and 6 may start.
    """

    def __init__(
        self, *, batch_size: int, queue_size: int, last_step: int, end: int, taken: int = 0, version: int = 0
    ) -> None:
        """Admit nothing yet.

        Args:
            queue_size: Q, how many batches may be sampled ahead of the current step's.
            last_step: the last step of the run, which no group is sampled for beyond.
            end: number of prompts of the run.
            taken: number of groups that steps have taken before.
        """
        self.taken = taken
        self.limit = taken
        """Groups below this position may start."""
        self._batch_size, self._queue_size = batch_size, queue_size
        self._last_step, self._end = last_step, end
        self._version = version
        self._missing = batch_size
        """Groups that the current step has not taken yet, as far as it is known."""
        self._finished: dict[int, _Group] = {}

    def published(self, version: int) -> None:
        """Note that the engines hold this version, and that the next step lacks a whole batch."""
        self._version, self._missing = version, self._batch_size
        if version < self._last_step:
            self.admit(self._batch_size)

    def admit(self, missing: int) -> None:
        """Admit what the current step lacks, and Q batches for the steps after it."""
        self._missing = missing
        ahead = min(self._queue_size, self._last_step - self._version - 1)
        self.limit = max(self.limit, min(self.taken + missing + ahead * self._batch_size, self._end))

    def finish(self, position: int, group: _Group) -> None:
        """Record an admitted group."""
        if not self.taken <= position < self.limit or position in self._finished:
            raise ValueError(f"group {position} was not admitted, or has finished before")
        self._finished[position] = group

    @property
    def finished(self) -> dict[int, _Group]:
        """The finished groups that no step has taken, by position."""
        return self._finished

    @property
    def is_settled(self) -> bool:
        """Whether all admitted groups have finished."""
        return len(self._finished) == self.limit - self.taken

    def is_ready(self, count: int) -> bool:
        """Whether the next `count` groups have finished."""
        return all(self.taken + i in self._finished for i in range(count))

    def take(self, count: int) -> list[_Group]:
        """Return the next `count` groups, in order."""
        groups = [self._finished.pop(self.taken + i) for i in range(count)]
        self.taken += count
        self._missing -= count
        return groups

    def is_fresh(self, position: int, oldest: int) -> bool:
        """Whether a group whose oldest token is of version `oldest` is still within Q versions when it is trained on.

        Settings may have changed since it was sampled. The groups before it fill the current step and as many batches
        as they can, or fewer steps if some of them are filtered.
        """
        behind = position - self.taken - self._missing
        later_steps = 0 if behind < 0 else 1 + behind // self._batch_size
        return self._version + later_steps - oldest <= self._queue_size
