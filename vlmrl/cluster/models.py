"""Models spread over ranks: how samples are dealt out to them, and how their results come together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from vlmrl.cluster.worker_group import Role_co, WorkerGroup
from vlmrl.data.balance import spread
from vlmrl.data.packing import FILLER, ImageCost, Pack
from vlmrl.observe.metrics import Metric, merge, reduce
from vlmrl.types import Experience, Floats, Layout, Metrics, Sample, Totals

if TYPE_CHECKING:
    from vlmrl.learning.critic import Critic
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.policy_and_critic import PolicyAndCritic
    from vlmrl.learning.reference import Reference

_Role = TypeVar("_Role")
_Result = TypeVar("_Result")

Work = list[list[tuple[Pack, Experience]]]
"""A rank's share of an update: for each optimizer step its packs, each with what the loss needs of it."""
Counts = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class PackingPlan:
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
        """The packs of each rank."""
        return spread(
            samples,
            num_ranks=num_ranks,
            layout=layout or self.layout,
            max_tokens=max_tokens or self.max_tokens,
            max_samples=self.max_samples,
            image_cost=self.image_cost,
            filler=self.filler,
        )


class PassMetrics:
    """Metrics of a step's passes, over all models and ranks, until the step is reported.

    Models that learn side by side add to it at the same time.
    """

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._lock = threading.Lock()

    def add(self, counts: Counts) -> None:
        with self._lock:
            self._counts = merge([self._counts, counts])

    def take(self) -> Counts:
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts


@dataclass(frozen=True, slots=True)
class Ranks(Generic[Role_co]):
    """One model over ranks, and how samples get there."""

    group: WorkerGroup[Role_co]
    packing: PackingPlan
    max_tokens: int
    """Token budget of a pass without gradient."""
    pass_metrics: PassMetrics

    def over(self, group: WorkerGroup[_Role]) -> Ranks[_Role]:
        """Another model's ranks, which get samples in the same way."""
        return Ranks(group, self.packing, self.max_tokens, self.pass_metrics)

    def forward(
        self,
        ask: Callable[[Role_co, list[Pack]], tuple[Sequence[tuple[int, _Result]], Counts]],
        samples: Sequence[Sample],
        *,
        layout: Layout | None = None,
        undivided: bool = False,
    ) -> list[_Result]:
        """The ranks' result for each sample; `layout` is the run's unless another is asked for.

        With `undivided` the samples are not dealt out: every rank makes the same passes, those of one rank alone. Few
        samples on many ranks would lie one by one, and share nothing that a layout shares.
        """
        num_ranks = 1 if undivided else len(self.group)
        packs = self.packing.spread(samples, num_ranks, max_tokens=self.max_tokens, layout=layout)
        if undivided:
            same = [replace(pack, ids=(FILLER,) * len(pack.ids)) for pack in packs[0]]
            packs += [same] * (len(self.group) - 1)
        by_sample: dict[int, _Result] = {}
        for results, counts in self.group.each(ask, packs):
            by_sample.update(results)
            self.pass_metrics.add(counts)
        return [by_sample[number] for number in range(len(samples))]

    def update(self, ask: Callable[[Role_co, Work], list[Counts]], steps: Sequence[Experience]) -> list[Counts]:
        """Deal out each optimizer step to the ranks; returns each rank's metrics of each step, but for those of passes,
        which are kept until the step is reported."""
        work: list[Work] = [[] for _ in range(len(self.group))]
        for part in steps:
            for rank, packs in enumerate(self.packing.spread(part.samples, len(self.group))):
                work[rank].append([(pack, experience_of(pack, part)) for pack in packs])
        of_steps = [metrics for of_rank in self.group.each(ask, work) for metrics in of_rank]
        for metrics in of_steps:
            self.pass_metrics.add({name: value for name, value in metrics.items() if name.startswith("vision/")})
        return [
            {name: value for name, value in metrics.items() if not name.startswith("vision/")} for metrics in of_steps
        ]


@dataclass(frozen=True, slots=True)
class Steps:
    """How an experience becomes optimizer steps; the same for policy and critic, so that both meet the same samples."""

    batch_size: int
    """Samples per optimizer step."""
    epochs: int
    """Passes over each experience."""
    seed: int
    """Of the order in which groups are met."""

    def of(self, experience: Experience, step: int) -> list[Experience]:
        rng = np.random.default_rng([self.seed % 2**63, step])
        parts = [
            experience.select(rows)
            for _ in range(self.epochs)
            for rows in minibatches(experience.samples, self.batch_size, rng)
        ]
        if experience.span is None:
            return parts
        start, end = experience.span
        edges = [start + (end - start) * number / len(parts) for number in range(len(parts) + 1)]
        return [replace(part, span=span) for part, span in zip(parts, pairwise(edges), strict=True)]


class RemotePolicy:
    """The trained model over ranks."""

    def __init__(self, ranks: Ranks[Policy], steps: Steps) -> None:
        self.ranks = ranks
        self._group = ranks.group
        self._steps = steps

    def logprobs(
        self,
        samples: Sequence[Sample],
        *,
        layout: Layout | None = None,
        undivided: bool = False,
        gradient: bool = False,
        adapter: bool = True,
        exact: bool = False,
    ) -> list[Floats]:
        """One array of [T] per sample; see `Ranks.forward` and `Policy.logprobs`."""
        return self.ranks.forward(
            lambda policy, packs: policy.logprobs(packs, gradient=gradient, adapter=adapter, exact=exact),
            samples,
            layout=layout,
            undivided=undivided,
        )

    def update(self, experience: Experience, *, step: int) -> Metrics:
        steps = self._steps.of(experience, step)
        totals = [count(part.samples) for part in steps]
        return reduce(self.ranks.update(lambda policy, work: policy.update(work, totals), steps))

    def fit(self, samples: Sequence[Sample]) -> Metrics:
        """One optimizer step of supervised training."""
        packs, total = self.ranks.packing.spread(samples, len(self._group)), count(samples)
        return reduce(self._group.each(lambda policy, share: policy.fit(share, total), packs))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within the context, passes are no part of a step: their metrics are forgotten."""
        before = self.ranks.pass_metrics.take()
        try:
            yield
        finally:
            self.ranks.pass_metrics.take()
            self.ranks.pass_metrics.add(before)

    def take_pass_metrics(self) -> Metrics:
        """Metrics of the passes since the last call, over all models and ranks."""
        return reduce([self.ranks.pass_metrics.take()])

    @property
    def layout(self) -> Layout:
        """How samples lie in its passes."""
        return self.ranks.packing.layout

    def compare_layouts(self, samples: Sequence[Sample]) -> dict[Layout, tuple[float, float]]:
        """How far the layouts that this run relies on are from `padded`: see `learning.layout_check`."""
        layouts: dict[Layout, list[Layout]] = {"padded": [], "packed": ["packed"], "shared": ["packed", "shared"]}
        compared = layouts[self.layout]
        if not compared:
            return {}
        return self._group.call(lambda policy: policy.compare_layouts(list(samples), compared))[0]

    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing yet."""
        return self._group.call(lambda policy: policy.adapter_is_zero())[0]

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        self._group.call(lambda policy: policy.save_checkpoint(folder, extra))

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """What is wrong with the files of a checkpoint, `name: why` each; [] where it is whole."""
        by_rank = self._group.call(lambda policy: policy.checkpoint_damage(folder))
        return [line for lines in by_rank for line in lines]

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        return self._group.call(lambda policy: policy.load_checkpoint(folder))[0]

    def set_progress(self, share: float) -> None:
        """Go on at the learning rate of a run that is so far, from 0 to 1."""
        self._group.call(lambda policy: policy.set_progress(share))

    def save_model(self, folder: Path) -> None:
        self._group.call(lambda policy: policy.save_model(folder))

    def save_average(self, folder: Path) -> None:
        """The moving average of the weights, as `save_model` writes the weights themselves."""
        self._group.call(lambda policy: policy.save_average(folder))

    def table(self) -> list[Any]:
        return self._group.call(lambda policy: policy.table())[0]


class RemoteReference:
    """A frozen model over ranks of its own."""

    def __init__(self, ranks: Ranks[Reference]) -> None:
        self._ranks = ranks

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """One array of [T] per sample."""
        return self._ranks.forward(lambda reference, packs: reference.logprobs(packs), samples)


class PolicyWithoutAdapter:
    """The reference of a policy that is an adapter on it: the policy's ranks with their adapters off."""

    def __init__(self, policy: RemotePolicy) -> None:
        self._policy = policy

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """One array of [T] per sample."""
        return self._policy.logprobs(samples, adapter=False)


class RemoteCritic:
    """The critic over ranks: its own, or the policy's."""

    def __init__(self, ranks: Ranks[Critic | PolicyAndCritic], steps: Steps) -> None:
        self._ranks = ranks
        self._group = ranks.group
        self._steps = steps

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """One array of [T] per sample: what is expected from each sampled token on; 0 elsewhere."""
        return self._ranks.forward(lambda critic, packs: critic.values(packs), samples)

    def update(self, experience: Experience, *, step: int) -> Metrics:
        steps = self._steps.of(experience, step)
        totals = [count(part.samples) for part in steps]
        return reduce(self._ranks.update(lambda critic, work: critic.update_values(work, totals), steps))

    def save_checkpoint(self, folder: Path) -> None:
        self._group.call(lambda critic: critic.save_critic_checkpoint(folder))

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """As `RemotePolicy.checkpoint_damage`, of the critic's part."""
        by_rank = self._group.call(lambda critic: critic.checkpoint_damage(folder))
        return [line for lines in by_rank for line in lines]

    def load_checkpoint(self, folder: Path) -> None:
        self._group.call(lambda critic: critic.load_critic_checkpoint(folder))

    def set_progress(self, share: float) -> None:
        """As `RemotePolicy.set_progress`; in the policy's processes both follow whoever is asked."""
        self._group.call(lambda critic: critic.set_progress(share))

    def save_model(self, folder: Path) -> None:
        """A folder that a reward model or another critic can start from."""
        self._group.call(lambda critic: critic.save_critic(folder))


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
    """What the loss of these samples is divided by: nothing where a sample is left out, and never 0."""
    tokens = [int(sample.sampled.sum()) for sample in samples]
    return Totals(num_tokens=max(sum(tokens), 1), num_samples=max(sum(number > 0 for number in tokens), 1))


def experience_of(pack: Pack, experience: Experience) -> Experience:
    """What the loss needs to know of a pack's samples; zeros for fillers."""
    blank = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in pack.samples]

    def column(values: Sequence[Floats]) -> list[Floats]:
        return [values[number] if number >= 0 else blank[i] for i, number in enumerate(pack.ids)]

    return experience.rearranged(pack.samples, column)
