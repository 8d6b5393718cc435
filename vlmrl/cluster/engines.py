"""The trainer's engines, in separate processes. Those that die are started again, and do their work again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ray

from vlmrl.cluster.engine_restarts import EngineRestarts
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.errors import ClusterError, EngineLossError, SyncError
from vlmrl.rollout.capacity import prompts_at_once
from vlmrl.system import stops
from vlmrl.types import Floats, Group, Prompt, Sampling

if TYPE_CHECKING:
    from vlmrl.learning.critic import Critic
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.reference import Reference
    from vlmrl.learning.reward_model import RewardModel
    from vlmrl.rollout.engine import RolloutEngine

    ColocatedGroups = Sequence[WorkerGroup[Policy | Critic | Reference | RewardModel]]

_ALL = ("weights", "kv_cache")
"""All memory that an engine can wake, in the order in which a step needs it."""
_Result = TypeVar("_Result")


class _Request(NamedTuple):
    """A prompt of `submit`."""

    prompt: Prompt
    sampling: Sampling
    on_done: Callable[[Callable[[], Group | None]], None]


class RemoteEngines:
    """Several engines. Each prompt goes to the engine with the fewest prompts in flight.

    All calls but `submit` are made while the policy holds the weights of the engines' version. If an engine dies during
    one of them it is started again, `resync` gives it these weights, and the call is repeated.
    """

    def __init__(
        self,
        group: WorkerGroup[RolloutEngine],
        *,
        timeout_s: float,
        sleeps: bool,
        on_progress: Callable[[int, int], None] | None = None,
        colocated: Callable[[], ColocatedGroups] = tuple,
        restarts: EngineRestarts | None = None,
        keep: Callable[[Group, Prompt], Group] | None = None,
    ) -> None:
        """`colocated` returns the other roles on the engines' GPUs; it is called after they have started. `restarts`
        None: an engine that dies is not started again. `keep` returns a group so that it outlives the engine that
        responded to the prompt, and raises if that has died; None: it does anyway."""
        self.group = group
        self.restarts = restarts or EngineRestarts(group)
        self.resync: Callable[[], object] | None = None
        """Starts dead engines again (`start_again`), and syncs the version of the others to them. None: the engines
        have their weights when they have started."""
        self._timeout_s = timeout_s
        self._sleeps = sleeps
        self._on_progress = on_progress
        self._colocated = colocated
        self._keep = keep or (lambda group, prompt: group)
        self._awake: set[str] = set(_ALL)
        self._engine_of: dict[int, int] = {}
        """Index of a prompt -> engine that generated its last responses with the current weights."""
        self._requests = threading.Lock()
        """Guards the next two fields: `submit` is called in a thread of its own."""
        self._in_flight: dict[ray.ObjectRef[Any], int] = {}
        """Call of `submit` -> engine."""
        self._held: list[_Request] = []
        """Prompts of `submit` that wait for an engine to be started again."""
        group.call(lambda engine: engine.start())
        # Other roles load their models onto the same GPUs now.
        self._sleep()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        self._prepare()
        groups = self._dispatch(prompts, sampling, on_group)
        self._sleep()
        return groups

    def submit(self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group | None]], None]) -> None:
        """Start to generate, and return at once; see `trainer.protocols.QueueingEngine`."""
        self._play(_Request(prompt, sampling, on_done))

    def _play(self, request: _Request) -> None:
        """Start a request on the usable engine with the fewest in flight, or hold it until there is one."""
        with self._requests:
            usable = self.restarts.usable
            if not usable:
                self._held.append(request)
                return
            load = Counter(self._in_flight.values())
            engine = min(usable, key=lambda number: load[number])
            incarnation = self.restarts.incarnation(engine)
            self._engine_of[request.prompt.index] = engine
            ref = self._start_prompt(engine, request.prompt, request.sampling)
            self._in_flight[ref] = engine

        def result() -> Group | None:
            with self._requests:
                del self._in_flight[ref]
            try:
                if self.restarts.incarnation(engine) == incarnation:
                    return self._keep(self.group.wait(ref), request.prompt)
            except Exception as error:
                # One death ends many requests: search for it once.
                if not self.restarts.is_lost(engine, incarnation):
                    self.restarts.find_dead()
                if not self.restarts.is_lost(engine, incarnation):
                    if not (isinstance(error, SyncError) and self.needs_repair):
                        raise
                    with self._requests:  # another engine has died, and with it a sync to this one
                        self._held.append(request)
                    return None
            self._play(request)
            return None

        ref.future().add_done_callback(lambda _: request.on_done(result))

    @property
    def needs_repair(self) -> bool:
        """Whether an engine has died, as far as is known, and does not have the weights again."""
        return self.restarts.is_needed

    @property
    def is_down(self) -> bool:
        """Whether prompts wait for an engine to be started again, or would."""
        return bool(self._held) or not self.restarts.usable

    def repair(self) -> None:
        """Start engines that have died again, with the weights of the others' version, and what they had under way.

        Raises:
            EngineLossError: they are not to be started again.
        """
        if self.resync is not None:
            self.resync()
        else:
            self.start_again()
            self.have_weights()

    def start_again(self) -> bool:
        """Start engines that have died, without weights; return whether there were any. Raises EngineLossError."""
        return self.restarts.start()

    def abandon_requests(self) -> None:
        """Prepare all engines for a new base, on which those that live cannot go on with what they have under way: it
        is sampled again."""
        with self._requests:  # a request is either of the old incarnation or held
            self.restarts.abandon(range(len(self.group)))

    def have_weights(self) -> None:
        """Note that all engines hold the current weights, and start the requests that were held."""
        self.restarts.have_weights()
        with self._requests:
            held, self._held = self._held, []
        for request in held:
            self._play(request)

    def _recover(self, error: Exception) -> list[int]:
        """Repair after an error of a call; return the numbers of the engines that have lost what they had under way.

        Raises `error` if none has died.
        """
        before = [self.restarts.incarnation(engine) for engine in range(len(self.group))]
        if not self.restarts.find_dead():
            raise error
        self.repair()
        return [engine for engine, incarnation in enumerate(before) if self.restarts.is_lost(engine, incarnation)]

    def _repeated(self, call: Callable[[], _Result]) -> _Result:
        """Make a call, again if an engine dies meanwhile."""
        while True:
            try:
                return call()
            except Exception as error:
                self._recover(error)

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        """Return log-probs of existing responses, [T] each, group by group (see `RolloutEngine.score`), from the engine
        that generated them if it is known.
        """
        self._prepare()
        by_group = self._repeated(lambda: self._wait(self._start_scoring(groups)))
        self._sleep()
        return [row for rows in by_group for row in rows]

    def begin_scoring(self, groups: Sequence[Group]) -> Callable[[], list[Floats] | None]:
        """Start what `score` does, on engines that do not sleep, and return at once.

        Returns a function that waits for the log-probs. It returns None if an engine has died: the policy may no longer
        hold the weights that it would need to start again. It raises EngineLossError if one does not respond.
        """
        self._prepare()
        started = self._start_scoring(groups)

        def take() -> list[Floats] | None:
            try:
                return [row for rows in self._wait(started) for row in rows]
            except Exception as error:
                if self.restarts.find_dead():
                    return None
                if isinstance(error, ClusterError):  # it hangs, and meanwhile the policy has been trained
                    raise EngineLossError(str(error)) from error
                raise

        return take

    def respond_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        """Return the responses of all engines to one prompt, for each value of `adapter`: with it (True) or the base
        alone."""
        self._prepare()

        def start(with_adapter: bool) -> list[Any]:
            return self.group.submit(lambda engine: engine.generate(prompt, sampling, adapter=with_adapter))

        def respond() -> list[list[Group]]:
            started = [start(with_adapter) for with_adapter in adapter]
            return [self._wait(calls) for calls in started]

        groups = self._repeated(respond)
        self._sleep()
        return groups

    def _dispatch(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None
    ) -> list[Group]:
        load = [0] * len(self.group)
        depth = prompts_at_once(len(prompts), len(self.group))
        waiting = list(range(len(prompts)))[::-1]
        in_flight: dict[ray.ObjectRef[Any], tuple[int, int]] = {}
        groups: dict[int, Group] = {}
        while waiting or in_flight:
            while waiting and min(load) < depth:
                engine = load.index(min(load))
                number = waiting.pop()
                in_flight[self._start_prompt(engine, prompts[number], sampling)] = (number, engine)
                self._engine_of[prompts[number].index] = engine
                load[engine] += 1
            with stops.interruptible_wait():
                done, _ = ray.wait(list(in_flight), num_returns=1, timeout=self._timeout_s)
            if not done:
                oldest = prompts[min(number for number, _ in in_flight.values())].source
                raise ClusterError(
                    f"no engine finished a response within {self._timeout_s:.0f} s "
                    f"({len(in_flight)} prompts in flight, the oldest: {oldest}): raise --vllm.generate_timeout_s "
                    "or lower --rollout.max_new_tokens"
                )
            for ref in done:
                number, engine = in_flight[ref]
                try:
                    groups[number] = self._keep(self.group.wait(ref), prompts[number])
                except Exception as error:
                    lost = self._recover(error)
                    waiting += sorted((n for n, by in in_flight.values() if by in lost), reverse=True)
                    in_flight = {ref: (n, by) for ref, (n, by) in in_flight.items() if by not in lost}
                    load = [0 if by in lost else count for by, count in enumerate(load)]
                    break
                del in_flight[ref]
                load[engine] -= 1
                if on_group is not None:
                    on_group(groups[number])
            if self._on_progress is not None:
                self._on_progress(len(groups), len(prompts))
        return [groups[number] for number in range(len(prompts))]

    def _wait(self, refs: list[ray.ObjectRef[Any]]) -> list[Any]:
        """Return the results of calls that generate or score."""
        results: list[Any] = self.group.wait(refs, self._timeout_s, flag="--vllm.generate_timeout_s")
        return results

    def _start_prompt(self, engine: int, prompt: Prompt, sampling: Sampling) -> ray.ObjectRef[Any]:
        return self.group.submit_to(engine, lambda role: role.respond(prompt, sampling))

    def _start_scoring(self, groups: Sequence[Group]) -> list[ray.ObjectRef[Any]]:
        def start(number: int, group: Group) -> ray.ObjectRef[Any]:
            engine = self._engine_of.get(group.prompt.index, number % len(self.group))
            return self.group.submit_to(engine, lambda role: role.score(group))

        return [start(number, group) for number, group in enumerate(groups)]

    def prepare_for_weights(self) -> None:
        """Prepare for new weights: sleeping engines wake their weights, but not their KV cache.

        Forgets which engine generated which response.
        """
        self._engine_of.clear()
        self._wake("weights")

    def _prepare(self) -> None:
        """Wake the engines. Those that are known to have died are started again first: the others may lack weights."""
        if self.restarts.is_needed:
            self.repair()
        self._repeated(lambda: self._wake(*_ALL))

    def _wake(self, *tags: str) -> None:
        """Wake the engines' memory, after the other roles on their GPUs have released what they do not use."""
        if not self._sleeps or self._awake.issuperset(tags):
            return
        for group, calls in [(group, group.submit(lambda role: role.release())) for group in self._colocated()]:
            group.wait(calls)
        self.group.call(lambda engine: engine.wake(tags))
        self._awake.update(tags)

    def _sleep(self) -> None:
        if self._sleeps:
            self.group.call(lambda engine: engine.sleep())
            self._awake.clear()

    def status(self) -> list[dict[str, Any]]:
        return self.group.call(lambda engine: engine.status())

    def shutdown(self) -> None:
        self.group.end(lambda engine: engine.shutdown())
