"""The trainer's Protocols over actors: what the loop calls, spread over processes and machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from vlmrl.cluster.device_path import DevicePath
from vlmrl.cluster.publish import send
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.data.repeats import Repeats
from vlmrl.data.source import BadLabels
from vlmrl.errors import ClusterError
from vlmrl.rollout.capacity import prompts_at_once
from vlmrl.rollout.reports import ReadbackPlan, ReadbackReport
from vlmrl.rollout.sampling import Sampling
from vlmrl.system import stops
from vlmrl.types import Floats, Group, Media, Metrics, Part, Prompt, Sample

_ALL = ("weights", "kv_cache")
"""What an engine can wake, in the order in which a step needs it."""


class RemotePrompts:
    """The stream of prompts in a process of its own: the driver sees token ids and handles, never pixels."""

    def __init__(self, group: WorkerGroup, *, say: Callable[[str], None]) -> None:
        """`say` shows people which rows were dropped, and why."""
        self._group = group
        self._say = say
        self._num_dropped = 0.0

    def look_at_labels(self) -> None:
        """Tell people how many labels of the first rows cannot be used, if there are any."""
        found: BadLabels = self._group.call("look_at_labels")[0]
        if found.problems:
            self._say(str(found))

    def look_at_repeats(self) -> None:
        """Tell people how many rows come twice, or are in an evaluation set too, if there are any."""
        found: Repeats = self._group.call("look_at_repeats")[0]
        for line in found.lines():
            self._say(line)

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        prompts, metrics = self._group.call("draw", count)[0]
        self._tell(metrics["data/rows_dropped"])
        return prompts, metrics

    def draw_samples(self, count: int) -> tuple[list[Sample], Metrics]:
        """The next `count` rows with their answers, for supervised training."""
        samples, metrics = self._group.call("draw_samples", count)[0]
        self._tell(metrics["data/rows_dropped"])
        return samples, metrics

    def evaluation(self) -> dict[str, list[Prompt]]:
        """Every prompt of each evaluation set."""
        sets: dict[str, list[Prompt]] = self._group.call("evaluation")[0]
        self._tell(math.inf)
        return sets

    @property
    def num_rows(self) -> int:
        return int(self._group.call("num_rows")[0])

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._group.call("state")[0]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self._group.call("load_state", state)

    def save_media(self, folder: Path, media: Sequence[Media]) -> None:
        """Write the images into `folder`, each named by its hash."""
        self._group.call("save_media", folder, list(media))

    def _tell(self, num_dropped: float) -> None:
        if num_dropped > self._num_dropped:
            for line in self._group.call("take_notes")[0]:
                self._say(line)
            self._num_dropped = num_dropped if math.isfinite(num_dropped) else self._num_dropped


class RemoteEngines:
    """Several engines; each prompt goes to the one with the fewest requests under way."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        timeout_s: float,
        sleeps: bool,
        on_progress: Callable[[int, int], None] | None = None,
        device_path: DevicePath | None = None,
    ) -> None:
        """With a `device_path` weights come from GPU to GPU, else through the object store and shared memory."""
        self._group = group
        self._device_path = device_path
        self._timeout_s = timeout_s
        self._sleeps = sleeps
        self._on_progress = on_progress
        self.neighbours: list[WorkerGroup] = []
        """Who else is on the engines' GPUs; set once they have started."""
        self._awake: set[str] = set(_ALL)
        self._answered_by: dict[int, int] = {}
        """Index of a prompt -> the engine that answered it last, since the weights changed."""
        group.call("start")
        # Others load their models onto the same GPUs now.
        self._sleep()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        self._wake(*_ALL)
        groups = self._dispatch(prompts, sampling, on_group)
        self._sleep()
        return groups

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        """Log-probs of answers that are there already, [T] each, group by group (see `RolloutEngine.score`): by the
        engine that gave them, where that is known.
        """
        self._wake(*_ALL)
        asked = [
            self._group.submit_to(self._answered_by.get(group.prompt.index, n % len(self._group)), "score", group)
            for n, group in enumerate(groups)
        ]
        answers: list[list[Floats]] = self._group.wait(asked, self._timeout_s)
        self._sleep()
        return [row for rows in answers for row in rows]

    def respond_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        """What every engine answers to one prompt, in their order: with the adapter or as the base would, in turn."""
        self._wake(*_ALL)
        asked = [self._group.submit("generate", prompt, sampling, adapter=each) for each in adapter]
        groups: list[list[Group]] = [self._group.wait(answers, self._timeout_s) for answers in asked]
        self._sleep()
        return groups

    def _dispatch(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None
    ) -> list[Group]:
        load = [0] * len(self._group)
        depth = prompts_at_once(len(prompts), len(self._group))
        waiting = list(range(len(prompts)))[::-1]
        under_way: dict[ray.ObjectRef[Any], tuple[int, int]] = {}
        answers: dict[int, Group] = {}
        while waiting or under_way:
            while waiting and min(load) < depth:
                engine = load.index(min(load))
                number = waiting.pop()
                ref = self._group.submit_to(engine, "generate", prompts[number], sampling)
                under_way[ref] = (number, engine)
                self._answered_by[prompts[number].index] = engine
                load[engine] += 1
            with stops.interruptible_wait():
                done, _ = ray.wait(list(under_way), num_returns=1, timeout=self._timeout_s)
            if not done:
                raise ClusterError(
                    f"no engine finished an answer within {self._timeout_s:.0f} s "
                    f"({len(under_way)} prompts under way): raise --vllm.generate_timeout_s "
                    "or lower --rollout.max_new_tokens"
                )
            for ref in done:
                number, engine = under_way.pop(ref)
                answers[number] = self._group.wait(ref)
                load[engine] -= 1
                if on_group is not None:
                    on_group(answers[number])
            if self._on_progress is not None:
                self._on_progress(len(answers), len(prompts))
        return [answers[number] for number in range(len(prompts))]

    def load(
        self,
        learner: WorkerGroup,
        *,
        version: int,
        max_bytes: int,
        vision_changed: bool,
        part: Part = "whole",
        readback: ReadbackPlan | None = None,
    ) -> int:
        """Publish a part of the learner's model to every engine, with proof: see `publish.send`.

        Of engines that sleep the weights wake, and the KV cache sleeps on.
        """
        self._answered_by.clear()
        self._wake("weights")
        return send(
            self._group,
            learner,
            version=version,
            max_bytes=max_bytes,
            vision_changed=vision_changed,
            part=part,
            device_path=self._device_path,
            readback=readback,
        )

    def readback(self) -> Metrics:
        """What was read back from the engines' layers after the last update of the model: how many layers of each,
        how many tensors could not be, and seconds of the slowest worker.
        """
        reports: list[ReadbackReport] = [one for each in self._group.call("readback") for one in each]
        return {
            "sync/readback_layers": float(min((one["layers"] for one in reports), default=0)),
            "sync/readback_unread": float(max((len(one["unread"]) for one in reports), default=0)),
            "sync/readback_s": max((one["seconds"] for one in reports), default=0.0),
        }

    def _wake(self, *what: str) -> None:
        """Let the engines take back memory, once the others on their GPUs have given back what they do not use."""
        if not self._sleeps or self._awake.issuperset(what):
            return
        for group, calls in [(group, group.submit("release")) for group in self.neighbours]:
            group.wait(calls)
        self._group.call("wake", what)
        self._awake.update(what)

    def _sleep(self) -> None:
        if self._sleeps:
            self._group.call("sleep")
            self._awake.clear()

    def status(self) -> list[dict[str, Any]]:
        statuses: list[dict[str, Any]] = self._group.call("status")
        return statuses

    def shutdown(self) -> None:
        self._group.end("shutdown")
