"""Report in one line which worker has died, on which machine, how it ended, and which setting may help.

The line replaces the errors that follow from the death: a broken collective in another rank, an image whose owner has
died, or Ray's forty lines about a dead actor. `worker_group.py` raises it. The death of vLLM's own process, inside a
worker that lives, is reported by `rollout/engine.py` (`DiedError`).
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

from vlmrl.errors import ClusterError, EngineLossError, VlmrlError
from vlmrl.system.exits import Pidfd, fatal_signal, format_exit, log_tail, may_be_out_of_memory, oom_kills

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

REPORTED_S = 5.0
"""Maximum time of the search for a dead worker after Ray has reported one."""
SUSPECTED_S = 1.0
"""The same after any other error, which a death that Ray has not noticed yet may have caused."""
_TRAINED = "lower --train.max_tokens_per_gpu, or spread the model: more ranks, --ds.zero_stage 3"
_FORWARD_ONLY = "lower --rollout.max_tokens_per_gpu"
_ADVICE = {
    "data": "lower --data.max_image_pixels or --data.max_pixels",
    "reward": "lower --reward.num_workers",
    "vllm": "lower --vllm.gpu_memory_utilization, or on CPU --vllm.cpu_kv_cache_gib",
    "actor": _TRAINED,
    "critic": _TRAINED,
    "ref": _FORWARD_ONLY,
    "teacher": _FORWARD_ONLY,
    "reward_model": _FORWARD_ONLY,
    "process_model": _FORWARD_ONLY,
}
"""Role -> what to do if memory may be the cause."""
_EXIT_CODE = re.compile(r"exit code (\d+)")
_LOG_LINES = 200
"""Lines of a dead worker's log that are copied."""


def memory_advice(role: str) -> str:
    """Advice for a role whose worker may have run out of memory."""
    return _ADVICE.get(role, "give the machine more memory")


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a role."""

    role: str
    number: int
    """Index among the role's workers."""
    size: int
    """Number of the role's workers."""
    node: str
    """Address of its machine; empty for this one."""
    ping: Callable[[], Any]
    """Asks the worker for a sign of life; returns Ray's reference to it."""
    is_here: bool = True
    """It runs on the driver's machine."""
    process: Pidfd | None = None
    log: Path | None = None
    """File of its error stream."""

    def __str__(self) -> str:
        """Name for messages, such as `actor 1 of 4 on 10.0.0.2`."""
        rank = f" {self.number} of {self.size}" if self.size > 1 else ""
        return f"{self.role}{rank}{f' on {self.node}' if self.node else ''}"


@dataclass(slots=True)
class Roster:
    """The running workers of a run: all that were started and not stopped on purpose."""

    members: dict[Any, Member] = field(default_factory=dict)
    """Ray's actor -> worker."""
    dump: Callable[[str], None] | None = None
    """Receives Ray's error and the last log lines of a dead worker; None: they are dropped."""
    death: str | None = None
    """The line about the first worker that died."""
    _killed_before: int = field(default_factory=oom_kills)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, actor: Any, member: Member) -> None:
        self.members[actor] = member

    def remove(self, actors: Sequence[Any]) -> None:
        """Remove workers that are about to be stopped on purpose."""
        for actor in actors:
            member = self.members.pop(actor, None)
            if member is not None and member.process is not None:
                member.process.close()

    def forget(self, actors: Sequence[Any]) -> None:
        """Remove dead workers that others take the place of: their deaths do not end the run."""
        with self._lock:
            self.remove(actors)
            self.death = None

    def find_death(self, patience_s: float) -> str | None:
        """Return the line about the first worker that died; None if no dead worker is found within `patience_s`."""
        with self._lock:  # several threads see the consequences of one death
            if self.death is None and self.members:
                dead = self._find_dead(patience_s)
                if dead is not None:
                    self.death = self.format_death(*dead)
            return self.death

    def _find_dead(self, patience_s: float) -> tuple[Member, RayActorError] | None:
        """Return a dead worker with Ray's error; None if none is found."""
        import ray

        pings = {member.ping(): member for member in list(self.members.values())}
        deadline = time.monotonic() + patience_s
        waiting = list(pings)
        while waiting:
            # A busy worker responds later, and counts as alive; a dead one raises an error at once.
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                return None
            try:
                ray.get(done)
            except ray.exceptions.ActorUnavailableError:
                continue  # not known yet
            except ray.exceptions.RayActorError as error:
                return pings[done[0]], error
            except ray.exceptions.RayError:
                continue  # it never started, which is reported where it was started
        return None

    def format_death(self, member: Member, error: RayActorError) -> str:
        """Return the line about a worker's death; `dump` receives the details."""
        text = str(error)
        if error.actor_init_failed:
            return f"{member} could not start: {(text.strip().splitlines() or [text])[-1].strip()}"
        code = None if member.process is None else member.process.returncode()
        if code is None and member.log is not None:
            code = fatal_signal(member.log)
        if code is None and (match := _EXIT_CODE.search(text)):
            code = int(match.group(1))
        by_kernel = member.is_here and may_be_out_of_memory(code) and oom_kills() > self._killed_before
        is_out_of_memory = by_kernel or "running low on memory" in text
        if self.dump is not None:
            tail = "" if member.log is None else "\n".join(log_tail(member.log).splitlines()[-_LOG_LINES:])
            self.dump(f"{member} died. Ray's error:\n{text}\nEnd of its log:\n{tail}\n")
        line = f"{member} {format_exit(code, is_out_of_memory=is_out_of_memory)}"
        if is_out_of_memory:
            return f"{line}; {memory_advice(member.role)}"
        if may_be_out_of_memory(code):
            return f"{line}; memory may have run out: {memory_advice(member.role)}"
        return f"{line}; its last output is in the log"


@contextmanager
def report_deaths(roster: Roster) -> Iterator[None]:
    """Context that replaces errors by a ClusterError about a dead worker, if one has died.

    Other errors for users (VlmrlError) do not follow from a death, and pass unchanged.
    """
    try:
        yield
    except EngineLossError:  # it names the deaths, and the checkpoint to resume from
        raise
    except ClusterError as error:
        line = roster.find_death(0.0)
        if line is None or line in str(error):
            raise
        raise ClusterError(line) from None
    except VlmrlError:
        raise
    except Exception:
        line = roster.find_death(SUSPECTED_S)
        if line is None:
            raise
        raise ClusterError(line) from None
