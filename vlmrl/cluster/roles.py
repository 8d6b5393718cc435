"""The trainer's Protocols over actors: what the loop calls, spread over processes and machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from vlmrl.cluster.device_path import DevicePath
from vlmrl.cluster.group import WorkerGroup
from vlmrl.cluster.publish import Publication, send
from vlmrl.data.balance import spread
from vlmrl.data.packing import ImageCost, Pack
from vlmrl.errors import ClusterError
from vlmrl.observe.metrics import Metric, merge, reduce
from vlmrl.rollout.sampling import Sampling
from vlmrl.types import Experience, Floats, Group, Layout, Media, Metrics, Part, Prompt, Sample, Score, Totals

_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Cut:
    """How samples become packs; the same for every pass over them."""

    layout: Layout
    max_tokens: int
    max_samples: int | None
    image_cost: ImageCost
    filler: Sample | None
    """The smallest sample with an image, for ranks that have none."""

    def spread(
        self,
        samples: Sequence[Sample],
        num_ranks: int,
        *,
        max_tokens: int | None = None,
        layout: Layout | None = None,
    ) -> list[list[Pack]]:
        return spread(
            samples,
            num_ranks=num_ranks,
            layout=layout or self.layout,
            max_tokens=max_tokens or self.max_tokens,
            max_samples=self.max_samples,
            image_cost=self.image_cost,
            filler=self.filler,
        )


class RemotePrompts:
    """The stream of prompts in a process of its own: the driver sees token ids and handles, never pixels."""

    def __init__(self, group: WorkerGroup, *, say: Callable[[str], None]) -> None:
        """`say` shows people which rows were dropped, and why."""
        self._group = group
        self._say = say
        self._num_dropped = 0.0

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


class RemoteRewarder:
    """Reward functions in a process of their own, with worker processes below it."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        scores: list[list[Score]] = self._group.call("score", list(groups))[0]
        return scores

    def close(self) -> None:
        _stop(self._group, "close")


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
        group.call("start")

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        if self._sleeps:
            self._group.call("wake")
        groups = self._dispatch(prompts, sampling)
        if self._sleeps:
            self._group.call("sleep")
        return groups

    def score(self, groups: Sequence[Group]) -> list[Floats]:
        """Log-probs of answers that are there already, [T] each, group by group (see `RolloutEngine.score`)."""
        if self._sleeps:
            self._group.call("wake")
        asked = [self._group.submit_to(n % len(self._group), "score", group) for n, group in enumerate(groups)]
        answers: list[list[Floats]] = self._group.wait(asked, self._timeout_s)
        if self._sleeps:
            self._group.call("sleep")
        return [row for rows in answers for row in rows]

    def answer_each(
        self, prompt: Prompt, sampling: Sampling, *, adapter: Sequence[bool] = (True,)
    ) -> list[list[Group]]:
        """What every engine answers to one prompt, in their order: with the adapter or as the base would, in turn."""
        if self._sleeps:
            self._group.call("wake")
        asked = [self._group.submit("generate", prompt, sampling, adapter=each) for each in adapter]
        groups: list[list[Group]] = [self._group.wait(answers, self._timeout_s) for answers in asked]
        if self._sleeps:
            self._group.call("sleep")
        return groups

    def _dispatch(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        load = [0] * len(self._group)
        # Deep enough to keep every engine's batch full, shallow enough that a slow engine gets fewer.
        depth = max(64, -(-len(prompts) // (2 * len(self._group))))
        waiting = list(range(len(prompts)))[::-1]
        under_way: dict[ray.ObjectRef[Any], tuple[int, int]] = {}
        answers: dict[int, Group] = {}
        while waiting or under_way:
            while waiting and min(load) < depth:
                engine = load.index(min(load))
                number = waiting.pop()
                ref = self._group.submit_to(engine, "generate", prompts[number], sampling)
                under_way[ref] = (number, engine)
                load[engine] += 1
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
            if self._on_progress is not None:
                self._on_progress(len(answers), len(prompts))
        return [answers[number] for number in range(len(prompts))]

    def load(
        self, learner: WorkerGroup, *, version: int, max_bytes: int, vision_changed: bool, part: Part = "whole"
    ) -> int:
        """Publish a part of the learner's model to every engine, with proof: see `publish.send`."""
        if self._sleeps:
            self._group.call("wake")
        return send(
            self._group,
            learner,
            version=version,
            max_bytes=max_bytes,
            vision_changed=vision_changed,
            part=part,
            device_path=self._device_path,
        )

    def status(self) -> list[dict[str, Any]]:
        statuses: list[dict[str, Any]] = self._group.call("status")
        return statuses

    def shutdown(self) -> None:
        _stop(self._group, "shutdown")


class Tally:
    """What the passes without gradients of a step took, over all models and ranks, until the step is reported."""

    def __init__(self) -> None:
        self._counts: dict[str, Metric] = {}

    def add(self, counts: dict[str, Metric]) -> None:
        self._counts = merge([self._counts, counts])

    def take(self) -> dict[str, Metric]:
        counts, self._counts = self._counts, {}
        return counts


class RemoteReference:
    """A frozen model over ranks; or the policy's own ranks, asked with `adapter=False`."""

    def __init__(self, group: WorkerGroup, cut: Cut, *, max_tokens: int, tally: Tally, **how: bool) -> None:
        """`how` goes along with every question."""
        self._group = group
        self._how = how
        self._cut = cut
        self._max_tokens = max_tokens
        self._tally = tally

    def logprobs(self, samples: Sequence[Sample], *, layout: Layout | None = None, **how: bool) -> list[Floats]:
        """One array of [T] per sample; `layout` is that of the run unless another is asked for."""
        packs = self._cut.spread(samples, len(self._group), max_tokens=self._max_tokens, layout=layout)
        found: dict[int, Floats] = {}
        for answers, counts in self._group.each("logprobs", packs, **(self._how | how)):
            found.update(answers)
            self._tally.add(counts)
        return [found[number] for number in range(len(samples))]


class RemotePolicy(RemoteReference):
    """The trained model over ranks, and the way from it to the engines.

    Args:
        batch_size: samples per optimizer step.
        epochs: passes over each experience.
        seed: of the order in which groups are met.
    """

    def __init__(
        self,
        group: WorkerGroup,
        cut: Cut,
        *,
        max_tokens: int,
        tally: Tally,
        batch_size: int,
        epochs: int,
        seed: int,
        publication: Publication,
    ) -> None:
        super().__init__(group, cut, max_tokens=max_tokens, tally=tally)
        self._batch_size = batch_size
        self._epochs = epochs
        self._seed = seed
        self.engines: RemoteEngines | None = None
        """Where `publish` sends the weights; set once both sides have started."""
        self._publication = publication
        self._has_published = False

    def update(self, experience: Experience, *, step: int) -> Metrics:
        rng = np.random.default_rng([self._seed, step])
        work: list[list[list[tuple[Pack, Experience]]]] = [[] for _ in range(len(self._group))]
        totals = []
        for _ in range(self._epochs):
            for rows in minibatches(experience.samples, self._batch_size, rng):
                part = experience.select(rows)
                totals.append(count(part.samples))
                for rank, packs in enumerate(self._cut.spread(part.samples, len(self._group))):
                    work[rank].append([(pack, experience_of(pack, part)) for pack in packs])
        shares = [self._group.submit_to(rank, "update", work[rank], totals) for rank in range(len(self._group))]
        return reduce([self._tally.take(), *(metrics for steps in self._group.wait(shares) for metrics in steps)])

    def fit(self, samples: Sequence[Sample]) -> Metrics:
        """One optimizer step of supervised training."""
        packs = self._cut.spread(samples, len(self._group))
        total = count(samples)
        shares = [self._group.submit_to(rank, "fit", packs[rank], total) for rank in range(len(self._group))]
        return reduce(self._group.wait(shares))

    def drop_counts(self) -> None:
        """Forget what the passes since the last update took: they were no part of a step."""
        self._tally.take()

    def publish(self, version: int) -> Metrics:
        assert self.engines is not None
        is_first, self._has_published = not self._has_published, True
        return self._publication.send(self._group, self.engines, version=version, is_first=is_first)

    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing yet."""
        return bool(self._group.call("adapter_is_zero")[0])

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        self._group.call("save_checkpoint", folder, extra)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        extra: dict[str, Any] = self._group.call("load_checkpoint", folder)[0]
        return extra

    def save_model(self, folder: Path) -> None:
        self._group.call("save_model", folder)

    def table(self) -> list[Any]:
        table: list[Any] = self._group.call("table")[0]
        return table


def _stop(group: WorkerGroup, method: str) -> None:
    """Ask the workers to end. Whoever does not answer is killed right after, and must not hide what ended the run."""
    with suppress(ClusterError):
        group.wait(group.submit(method), timeout_s=_STOP_S)


def minibatches(samples: Sequence[Sample], batch_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Cut a batch into optimizer steps of `batch_size` samples; a group is never torn apart.

    The order of the groups is drawn anew. The last step takes what is left.
    """
    members: dict[int, list[int]] = {}
    for number, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(number)
    order = rng.permutation(list(members))
    batches: list[list[int]] = [[]]
    for group in order:
        if batches[-1] and len(batches[-1]) + len(members[int(group)]) > batch_size:
            batches.append([])
        batches[-1].extend(members[int(group)])
    return [sorted(batch) for batch in batches]


def count(samples: Sequence[Sample]) -> Totals:
    """What the loss of these samples is divided by."""
    return Totals(num_tokens=int(sum(s.sampled.sum() for s in samples)), num_samples=len(samples))


def experience_of(pack: Pack, experience: Experience) -> Experience:
    """What the loss needs to know of a pack's samples; zeros for fillers."""
    blank = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in pack.samples]

    def column(values: Sequence[Floats]) -> list[Floats]:
        return [values[number] if number >= 0 else blank[i] for i, number in enumerate(pack.ids)]

    return Experience(
        samples=pack.samples,
        advantages=column(experience.advantages),
        old_logprobs=None if experience.old_logprobs is None else column(experience.old_logprobs),
        rollout_logprobs=column(experience.rollout_logprobs),
        ref_logprobs=None if experience.ref_logprobs is None else column(experience.ref_logprobs),
    )
