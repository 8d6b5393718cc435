"""Tells in one line which worker of a run has died, on which machine, how it ended, and which setting may help.

The line comes in place of whatever went wrong because of the death: a collective that breaks in another rank, an image
whose owner is gone, an actor that Ray calls dead in forty lines.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import ClusterError, VlmrlError
from vlmrl.system.exits import Pidfd, fatal_signal, format_exit, log_tail, may_be_out_of_memory, oom_kills

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

SURE_S = 5.0
"""Ray has said that some worker is dead: so long it is looked for."""
DOUBT_S = 1.0
"""The same when something else has gone wrong, which may come of a death that Ray has not noticed yet."""
_RANKS = "lower --train.max_tokens_per_gpu, or spread the model: more ranks, --ds.zero_stage 3"
_PASSES = "lower --rollout.max_tokens_per_gpu"
_ADVICE = {
    "data": "lower --data.max_image_pixels or --data.max_pixels",
    "reward": "lower --reward.num_workers",
    "vllm": "lower --vllm.gpu_memory_utilization, or on CPU --vllm.cpu_kv_cache_gib",
    "actor": _RANKS,
    "critic": _RANKS,
    "ref": _PASSES,
    "reward_model": _PASSES,
    "process_model": _PASSES,
}
"""Role -> what to do where memory may be the cause."""
_EXIT_CODE = re.compile(r"exit code (\d+)")
_SHOWN = 200
"""Lines of a dead worker's log that are copied."""


def advice_of(role: str) -> str:
    """What to do where a worker of the role may have died because memory was used up."""
    return _ADVICE.get(role, "give the machine more memory")


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a role."""

    role: str
    number: int
    """From 0, among the role's workers."""
    size: int
    """How many workers the role has."""
    node: str
    """Address of its machine; empty: this one."""
    ping: Callable[[], Any]
    """Asks it for a sign of life; returns a reference for Ray."""
    is_here: bool = True
    """It runs on the driver's machine."""
    process: Pidfd | None = None
    log: Path | None = None
    """What it writes to its error stream."""

    def __str__(self) -> str:
        """`data`, `actor 1 of 4`, with its machine."""
        rank = f" {self.number} of {self.size}" if self.size > 1 else ""
        return f"{self.role}{rank}{f' on {self.node}' if self.node else ''}"


@dataclass(slots=True)
class Roster:
    """The workers of a run that nobody has ended on purpose."""

    members: dict[Any, Member] = field(default_factory=dict)
    """Ray's id of a worker -> what it is."""
    dump: Callable[[str], None] | None = None
    """Where the last words of a dead worker go, beside the one line; None: nowhere."""
    found: str | None = None
    """The line that says who has died first."""
    _killed_before: int = field(default_factory=oom_kills)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: Any, member: Member) -> None:
        self.members[name] = member

    def remove(self, names: Sequence[Any]) -> None:
        """They are about to be ended on purpose."""
        for name in names:
            member = self.members.pop(name, None)
            if member is not None and member.process is not None:
                member.process.close()

    def why(self, patience_s: float) -> str | None:
        """The line that says which worker has died; None when none has, as far as can be told in `patience_s`."""
        with self._lock:  # several threads meet the consequences of one death
            if self.found is None and self.members:
                dead = self._look(patience_s)
                if dead is not None:
                    self.found = self._told(*dead)
            return self.found

    def _look(self, patience_s: float) -> tuple[Member, RayActorError] | None:
        """A worker that has died, and what Ray says of it."""
        import ray

        asked = {member.ping(): member for member in list(self.members.values())}
        deadline = time.monotonic() + patience_s
        waiting = list(asked)
        while waiting:
            # A worker at work answers later, which is a sign of life, too; a dead one is an error at once.
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                return None
            try:
                ray.get(done)
            except ray.exceptions.ActorUnavailableError:
                continue  # nobody knows yet whether it lives
            except ray.exceptions.RayActorError as error:
                return asked[done[0]], error
            except ray.exceptions.RayError:
                continue  # it was never there, and what kept it from starting is told by who started it
        return None

    def _told(self, member: Member, error: RayActorError) -> str:
        said = str(error)
        if error.actor_init_failed:
            return f"{member} could not start: {(said.strip().splitlines() or [said])[-1].strip()}"
        code = None if member.process is None else member.process.returncode()
        if code is None and member.log is not None:
            code = fatal_signal(member.log)
        if code is None and (stated := _EXIT_CODE.search(said)):
            code = int(stated.group(1))
        by_kernel = member.is_here and may_be_out_of_memory(code) and oom_kills() > self._killed_before
        is_out_of_memory = by_kernel or "running low on memory" in said
        if self.dump is not None:
            words = "" if member.log is None else "\n".join(log_tail(member.log).splitlines()[-_SHOWN:])
            self.dump(f"{member} died. Ray says:\n{said}\nIts last words:\n{words}\n")
        line = f"{member} {format_exit(code, is_out_of_memory=is_out_of_memory)}"
        if is_out_of_memory:
            return f"{line}; {advice_of(member.role)}"
        if may_be_out_of_memory(code):
            return f"{line}; most often memory is used up: {advice_of(member.role)}"
        return f"{line}; its last words are in the log"


@contextmanager
def told_of(roster: Roster) -> Iterator[None]:
    """Raise ClusterError with the line of a worker that has died, in place of what went wrong because of that.

    A user's mistake is no such consequence.
    """
    try:
        yield
    except ClusterError as error:
        line = roster.why(0.0)
        if line is None or line in str(error):
            raise
        raise ClusterError(line) from None
    except VlmrlError:
        raise
    except Exception:
        line = roster.why(DOUBT_S)
        if line is None:
            raise
        raise ClusterError(line) from None
