"""Models over ranks: distribute samples, and collect the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from vlmrl.cluster.sequence_groups import each_group
from vlmrl.cluster.worker_group import Role_co, WorkerGroup
from vlmrl.data.balance import spread
from vlmrl.data.experience import Experience
from vlmrl.data.packing import FILLER, ImageCost, Pack, by_response
from vlmrl.observe.metrics import Metric, merge, reduce
from vlmrl.types import Floats, Layout, Metrics, Sample, Totals

if TYPE_CHECKING:
    from vlmrl.learning.critic import Critic
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.policy_and_critic import PolicyAndCritic
    from vlmrl.learning.reference import Reference
    from vlmrl.learning.teacher import Teacher

_Role = TypeVar("_Role")
_Result = TypeVar("_Result")

Work = list[list[tuple[Pack, Experience]]]
"""A rank's share of an update: for each optimizer step its packs, with their experience."""
Counts = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The packing of samples, the same for all passes."""

    layout: Layout
    max_tokens: int
    max_samples: int | None
    image_cost: ImageCost
    filler: Sample | None
    """The smallest sample with an image, for ranks without any; None for models without images."""

    def spread(
        self,
        samples: Sequence[Sample],
        num_ranks: int,
        *,
        max_tokens: int | None = None,
        layout: Layout | None = None,
        whole_responses: bool = False,
    ) -> list[list[Pack]]:
        """Return the packs of each rank."""
        return spread(
            samples,
            num_ranks=num_ranks,
            layout=layout or self.layout,
            max_tokens=max_tokens or self.max_tokens,
            max_samples=self.max_samples,
            image_cost=self.image_cost,
            filler=self.filler,
            whole_responses=whole_responses,
        )


class PassMetrics:
    """Metrics of a step's passes, over all models and ranks, until the step is reported.

    Thread-safe: models that train in parallel add to it.
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
    """One model over ranks, with the packing of its samples."""

    group: WorkerGroup[Role_co]
    packing: PackingPlan
    max_tokens: int
    """Token budget of a forward pass."""
    pass_metrics: PassMetrics
    sequence_size: int = 1
    """Ranks that share the tokens of each pass."""

    @property
    def num_groups(self) -> int:
        """Groups of ranks with the same packs."""
        return len(self.group) // self.sequence_size

    def over(self, group: WorkerGroup[_Role], *, sequence_size: int = 1) -> Ranks[_Role]:
        """Another model's ranks, with the same packing."""
        return Ranks(group, self.packing, self.max_tokens, self.pass_metrics, sequence_size)

    def forward(
        self,
        call: Callable[[Role_co, list[Pack]], tuple[Sequence[tuple[int, _Result]], Counts]],
        samples: Sequence[Sample],
        *,
        layout: Layout | None = None,
        undivided: bool = False,
    ) -> list[_Result]:
        """Return the result for each sample.

        Args:
            layout: None for that of the run.
            undivided: all ranks make the same passes over all samples. A few samples that are divided among many ranks
                would not be packed together, so that a layout would have nothing to share.
        """
        shares, max_tokens = 1 if undivided else self.num_groups, self.max_tokens * self.sequence_size
        packs = self.packing.spread(samples, shares, max_tokens=max_tokens, layout=layout)
        if undivided:
            same = [replace(pack, ids=(FILLER,) * len(pack.ids)) for pack in packs[0]]
            packs += [same] * (self.num_groups - 1)
        by_sample: dict[int, _Result] = {}
        for results, counts in each_group(self.group, call, packs):
            by_sample.update(results)
            self.pass_metrics.add(counts)
        return [by_sample[number] for number in range(len(samples))]

    def update(
        self,
        call: Callable[[Role_co, Work], list[Counts]],
        steps: Sequence[Experience],
        *,
        whole_responses: bool = False,
    ) -> list[Counts]:
        """Divide each optimizer step among the ranks. Returns the metrics of each rank and step, except those of
        passes, which are kept until the step is reported.

        `whole_responses`: the loss of a token depends on all of its response, whose samples stay in one pack.
        """
        work: list[Work] = [[] for _ in range(self.num_groups)]
        for part in steps:
            shares = self.packing.spread(part.samples, self.num_groups, whole_responses=whole_responses)
            for rank, packs in enumerate(shares):
                work[rank].append([(pack, pack_experience(pack, part)) for pack in packs])
        of_steps = [metrics for of_rank in each_group(self.group, call, work) for metrics in of_rank]
        for metrics in of_steps:
            self.pass_metrics.add({name: value for name, value in metrics.items() if name.startswith("vision/")})
        return [
            {name: value for name, value in metrics.items() if not name.startswith("vision/")} for metrics in of_steps
        ]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The division of an experience into optimizer steps, the same for policy and critic."""

    batch_size: int
    """Responses per optimizer step."""
    epochs: int
    """Passes over each experience."""
    seed: int
    """Seed of the order of groups."""

    def split(self, experience: Experience, step: int) -> list[Experience]:
        """Return the experience of each optimizer step; `step` is the run's."""
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

    def __init__(self, ranks: Ranks[Policy], step_plan: StepPlan, *, whole_responses: bool = False) -> None:
        """`whole_responses`: see `Ranks.update`."""
        self.ranks = ranks
        self._group = ranks.group
        self._step_plan = step_plan
        self._whole_responses = whole_responses

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
        """Return one array of [T] per sample; see `Ranks.forward` and `Policy.logprobs`."""
        return self.ranks.forward(
            lambda policy, packs: policy.logprobs(packs, gradient=gradient, adapter=adapter, exact=exact),
            samples,
            layout=layout,
            undivided=undivided,
        )

    def update(self, experience: Experience, *, step: int) -> Metrics:
        steps = self._step_plan.split(experience, step)
        totals = [loss_totals(part.samples) for part in steps]
        of_steps = self.ranks.update(
            lambda policy, work: policy.update(work, totals), steps, whole_responses=self._whole_responses
        )
        return reduce(of_steps)

    def take_old_logprobs(self, rows: Sequence[int]) -> dict[int, Floats]:
        """Return, once, the old log-probs of these samples, [T] by row of the experience; {} unless the last update
        computed them itself, as it does in a single optimizer step."""
        found: dict[int, Floats] = {}
        for of_rank in self._group.call(lambda policy: policy.take_old_logprobs(rows)):
            found |= of_rank
        return found

    def fit(self, samples: Sequence[Sample]) -> Metrics:
        """Take one optimizer step of supervised training; return its metrics."""
        packs, total = self.ranks.packing.spread(samples, self.ranks.num_groups), loss_totals(samples)
        return reduce(each_group(self._group, lambda policy, share: policy.fit(share, total), packs))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context whose passes are not part of a step: their metrics are dropped."""
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
        """Layout of samples in the policy's passes."""
        return self.ranks.packing.layout

    def compare_layouts(self, samples: Sequence[Sample]) -> dict[Layout, tuple[float, float]]:
        """Differences between `padded` and each layout that this run relies on; see `learning.layout_check`."""
        layouts: dict[Layout, list[Layout]] = {"padded": [], "packed": ["packed"], "shared": ["packed", "shared"]}
        compared = layouts[self.layout]
        if not compared:
            return {}
        return self._group.call(lambda policy: policy.compare_layouts(list(samples), compared))[0]

    def adapter_is_zero(self) -> bool:
        """Whether the adapter has no effect yet."""
        return self._group.call(lambda policy: policy.adapter_is_zero())[0]

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        self._group.call(lambda policy: policy.save_checkpoint(folder, extra))

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """Damaged files of a checkpoint, a line `name: problem` for each; [] if it is complete."""
        by_rank = self._group.call(lambda policy: policy.checkpoint_damage(folder))
        return [line for lines in by_rank for line in lines]

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        return self._group.call(lambda policy: policy.load_checkpoint(folder))[0]

    def set_progress(self, share: float) -> None:
        """Set the learning rate to that of a run at this share of its length, from 0 to 1."""
        self._group.call(lambda policy: policy.set_progress(share))

    def save_model(self, folder: Path) -> None:
        self._group.call(lambda policy: policy.save_model(folder))

    def save_average(self, folder: Path) -> None:
        """Save the moving average of the weights in the format of `save_model`."""
        self._group.call(lambda policy: policy.save_average(folder))

    def table(self) -> list[Any]:
        return self._group.call(lambda policy: policy.table())[0]


class RemoteReference:
    """The frozen reference model over its own ranks."""

    def __init__(self, ranks: Ranks[Reference]) -> None:
        self._ranks = ranks

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample."""
        return self._ranks.forward(lambda reference, packs: reference.logprobs(packs), samples)


class RemoteTeacher:
    """The frozen teacher over its own ranks."""

    def __init__(self, ranks: Ranks[Teacher]) -> None:
        self._ranks = ranks

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample; NaN at tokens that the teacher does not have."""
        return self._ranks.forward(lambda teacher, packs: teacher.logprobs(packs), samples)


class PolicyWithoutAdapter:
    """The reference of a policy that is an adapter on it: the policy's ranks with adapters off."""

    def __init__(self, policy: RemotePolicy) -> None:
        self._policy = policy

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample."""
        return self._policy.logprobs(samples, adapter=False)


class RemoteCritic:
    """The critic over its own ranks, or the policy's."""

    def __init__(self, ranks: Ranks[Critic | PolicyAndCritic], step_plan: StepPlan) -> None:
        self._ranks = ranks
        self._group = ranks.group
        self._step_plan = step_plan

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample: the expected return from each sampled token on; 0 elsewhere."""
        return self._ranks.forward(lambda critic, packs: critic.values(packs), samples)

    def update(self, experience: Experience, *, step: int) -> Metrics:
        steps = self._step_plan.split(experience, step)
        totals = [loss_totals(part.samples) for part in steps]
        return reduce(self._ranks.update(lambda critic, work: critic.update_values(work, totals), steps))

    def save_checkpoint(self, folder: Path) -> None:
        self._group.call(lambda critic: critic.save_critic_checkpoint(folder))

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """As `RemotePolicy.checkpoint_damage`, for the critic's files."""
        by_rank = self._group.call(lambda critic: critic.checkpoint_damage(folder))
        return [line for lines in by_rank for line in lines]

    def load_checkpoint(self, folder: Path) -> None:
        self._group.call(lambda critic: critic.load_critic_checkpoint(folder))

    def set_progress(self, share: float) -> None:
        """As `RemotePolicy.set_progress`. In shared processes either call sets both learning rates."""
        self._group.call(lambda critic: critic.set_progress(share))

    def save_model(self, folder: Path) -> None:
        """Save a folder that a reward model or another critic can start from."""
        self._group.call(lambda critic: critic.save_critic(folder))


def minibatches(samples: Sequence[Sample], batch_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Split a batch into optimizer steps of about `batch_size` responses, without splitting a group.

    The groups are shuffled. The last step gets the rest.
    """
    members: dict[int, list[list[int]]] = {}
    for response in by_response(samples):
        members.setdefault(samples[response[0]].group, []).append(response)
    order = rng.permutation(list(members))
    batches: list[list[list[int]]] = [[]]
    for group in order:
        if batches[-1] and len(batches[-1]) + len(members[int(group)]) > batch_size:
            batches.append([])
        batches[-1].extend(members[int(group)])
    return [sorted(number for response in batch for number in response) for batch in batches]


def loss_totals(samples: Sequence[Sample]) -> Totals:
    """Return the denominators of the loss of these samples: those that are left out do not count, and the minimum is
    1."""
    tokens = [int(sample.sampled.sum()) for sample in samples]
    num_responses = sum(any(tokens[i] for i in members) for members in by_response(samples))
    return Totals(num_tokens=max(sum(tokens), 1), num_responses=max(num_responses, 1))


def pack_experience(pack: Pack, experience: Experience) -> Experience:
    """Return the experience of a pack's samples; zeros for fillers."""
    blank = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in pack.samples]

    def column(values: Sequence[Floats]) -> list[Floats]:
        return [values[number] if number >= 0 else blank[i] for i, number in enumerate(pack.ids)]

    return experience.rearranged(pack.samples, column)
