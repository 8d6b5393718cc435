"""The trainer's engines, in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.errors import ClusterError
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


class RemoteEngines:
    """Several engines. Each prompt goes to the engine with the fewest prompts in flight."""

    def __init__(
        self,
        group: WorkerGroup[RolloutEngine],
        *,
        timeout_s: float,
        sleeps: bool,
        on_progress: Callable[[int, int], None] | None = None,
        colocated: Callable[[], ColocatedGroups] = tuple,
    ) -> None:
        """`colocated` returns the other roles on the engines' GPUs; it is called after they have started."""
        self.group = group
        self._timeout_s = timeout_s
        self._sleeps = sleeps
        self._on_progress = on_progress
        self._colocated = colocated
        self._awake: set[str] = set(_ALL)
        self._engine_of: dict[int, int] = {}
        """Index of a prompt -> engine that generated its last responses with the current weights."""
        self._submitted = [0] * len(group)
        """Prompts of `submit` that each engine has in flight."""
        group.call(lambda engine: engine.start())
        # Other roles load their models onto the same GPUs now.
        self._sleep()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        self._wake(*_ALL)
        groups = self._dispatch(prompts, sampling, on_group)
        self._sleep()
        return groups

    def submit(self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group]], None]) -> None:
        """Start to generate, and return at once; see `trainer.protocols.QueueingEngine`.

        The function that `on_done` gets must be called in the thread that submits.
        """
        engine = self._submitted.index(min(self._submitted))
        self._submitted[engine] += 1
        self._engine_of[prompt.index] = engine
        ref = self._start_prompt(engine, prompt, sampling)

        def result() -> Group:
            self._submitted[engine] -= 1
            group: Group = self.group.wait(ref)
            return group

        ref.future().add_done_callback(lambda _: on_done(result))

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        """Return log-probs of existing responses, [T] each, group by group (see `RolloutEngine.score`), from the engine
        that generated them if it is known.
        """
        self._wake(*_ALL)
        started = [self._start_scoring(number, group) for number, group in enumerate(groups)]
        by_group: list[list[Floats]] = self.group.wait(started, self._timeout_s)
        self._sleep()
        return [row for rows in by_group for row in rows]

    def respond_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        """Return the responses of all engines to one prompt, for each value of `adapter`: with it (True) or the base
        alone."""
        self._wake(*_ALL)

        def start(with_adapter: bool) -> list[Any]:
            return self.group.submit(lambda engine: engine.generate(prompt, sampling, adapter=with_adapter))

        started = [start(with_adapter) for with_adapter in adapter]
        groups: list[list[Group]] = [self.group.wait(calls, self._timeout_s) for calls in started]
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
                number, engine = in_flight.pop(ref)
                groups[number] = self.group.wait(ref)
                load[engine] -= 1
                if on_group is not None:
                    on_group(groups[number])
            if self._on_progress is not None:
                self._on_progress(len(groups), len(prompts))
        return [groups[number] for number in range(len(prompts))]

    def _start_prompt(self, engine: int, prompt: Prompt, sampling: Sampling) -> ray.ObjectRef[Any]:
        return self.group.submit_to(engine, lambda role: role.respond(prompt, sampling))

    def _start_scoring(self, number: int, group: Group) -> ray.ObjectRef[Any]:
        engine = self._engine_of.get(group.prompt.index, number % len(self.group))
        return self.group.submit_to(engine, lambda role: role.score(group))

    def prepare_for_weights(self) -> None:
        """Prepare for new weights: sleeping engines wake their weights, but not their KV cache.

        Forgets which engine generated which response.
        """
        self._engine_of.clear()
        self._wake("weights")

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
