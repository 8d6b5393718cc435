"""Models spread over ranks: how samples are dealt out to them, and how what they answer comes together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.data.balance import spread
from vlmrl.data.packing import FILLER, ImageCost, Pack
from vlmrl.observe.metrics import Metric, merge, reduce
from vlmrl.types import Experience, Floats, Layout, Metrics, Sample, Totals


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


class Tally:
    """What the passes without gradients of a step took, over all models and ranks, until the step is reported.

    Models that learn side by side tell it at the same time.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Metric] = {}
        self._lock = threading.Lock()

    def add(self, counts: dict[str, Metric]) -> None:
        with self._lock:
            self._counts = merge([self._counts, counts])

    def take(self) -> dict[str, Metric]:
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts


@dataclass(frozen=True, slots=True)
class Ranks:
    """One model over ranks, and how samples get there."""

    group: WorkerGroup
    cut: Cut
    max_tokens: int
    """Token budget of a pass without gradient."""
    tally: Tally

    def ask(
        self,
        method: str,
        samples: Sequence[Sample],
        *,
        layout: Layout | None = None,
        undivided: bool = False,
        **how: bool,
    ) -> dict[int, Any]:
        """What the ranks answer to each sample, by its number; `layout` is the run's unless another is asked for.

        With `undivided` the samples are not dealt out: every rank makes the same passes, those of one rank alone. Few
        samples on many ranks would lie one by one, and share nothing that a layout shares.
        """
        packs = self.cut.spread(samples, 1 if undivided else len(self.group), max_tokens=self.max_tokens, layout=layout)
        if undivided:
            same = [replace(pack, ids=(FILLER,) * len(pack.ids)) for pack in packs[0]]
            packs += [same] * (len(self.group) - 1)
        found: dict[int, Any] = {}
        for answers, counts in self.group.each(method, packs, **how):
            found.update(answers)
            self.tally.add(counts)
        return found

    def teach(self, method: str, steps: Sequence[Experience]) -> list[dict[str, Metric]]:
        """Deal out each optimizer step to the ranks; what each rank says of each step, but for what the tally keeps."""
        work: list[list[list[tuple[Pack, Experience]]]] = [[] for _ in range(len(self.group))]
        for part in steps:
            for rank, packs in enumerate(self.cut.spread(part.samples, len(self.group))):
                work[rank].append([(pack, experience_of(pack, part)) for pack in packs])
        totals = [count(part.samples) for part in steps]
        shares = [self.group.submit_to(rank, method, work[rank], totals) for rank in range(len(self.group))]
        found = [metrics for steps in self.group.wait(shares) for metrics in steps]
        for metrics in found:
            self.tally.add({name: value for name, value in metrics.items() if name.startswith("vision/")})
        return [{name: value for name, value in metrics.items() if not name.startswith("vision/")} for metrics in found]


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


class RemoteReference:
    """A frozen model over ranks; or the policy's own ranks, asked with `adapter=False`."""

    def __init__(self, ranks: Ranks, **how: bool) -> None:
        """`how` goes along with every question."""
        self._ranks = ranks
        self._how = how

    def logprobs(self, samples: Sequence[Sample], *, layout: Layout | None = None, **how: bool) -> list[Floats]:
        """One array of [T] per sample; `layout` is that of the run unless another is asked for. See `Ranks.ask`."""
        found = self._ranks.ask("logprobs", samples, layout=layout, **(self._how | how))
        return [found[number] for number in range(len(samples))]


class RemotePolicy(RemoteReference):
    """The trained model over ranks."""

    def __init__(self, ranks: Ranks, steps: Steps) -> None:
        super().__init__(ranks)
        self._group = ranks.group
        self._steps = steps

    def update(self, experience: Experience, *, step: int) -> Metrics:
        return reduce(self._ranks.teach("update", self._steps.of(experience, step)))

    def fit(self, samples: Sequence[Sample]) -> Metrics:
        """One optimizer step of supervised training."""
        packs = self._ranks.cut.spread(samples, len(self._group))
        total = count(samples)
        shares = [self._group.submit_to(rank, "fit", packs[rank], total) for rank in range(len(self._group))]
        return reduce(self._group.wait(shares))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within the context, passes are no part of a step: what they take is forgotten."""
        before = self._ranks.tally.take()
        try:
            yield
        finally:
            self._ranks.tally.take()
            self._ranks.tally.add(before)

    def take_pass_metrics(self) -> Metrics:
        """Metrics of the passes since the last call, over all models and ranks."""
        return reduce([self._ranks.tally.take()])

    @property
    def layout(self) -> Layout:
        """How samples lie in its passes."""
        return self._ranks.cut.layout

    def compare_layouts(self, samples: Sequence[Sample]) -> dict[Layout, tuple[float, float]]:
        """How far the layouts that this run relies on are from `padded`: see `learning.layout_check`."""
        layouts: dict[Layout, list[Layout]] = {"padded": [], "packed": ["packed"], "shared": ["packed", "shared"]}
        found: dict[Layout, tuple[float, float]] = {}
        if layouts[self.layout]:
            found = self._group.call("compare_layouts", list(samples), layouts[self.layout])[0]
        return found

    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing yet."""
        return bool(self._group.call("adapter_is_zero")[0])

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        self._group.call("save_checkpoint", folder, extra)

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """What is wrong with the files of a checkpoint, `name: why` each; [] where it is whole."""
        return _damage(self._group, folder)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        extra: dict[str, Any] = self._group.call("load_checkpoint", folder)[0]
        return extra

    def follow(self, share: float) -> None:
        """Go on at the learning rate of a run that is so far, from 0 to 1."""
        self._group.call("follow", share)

    def save_model(self, folder: Path) -> None:
        self._group.call("save_model", folder)

    def save_average(self, folder: Path) -> None:
        """The moving average of the weights, as `save_model` writes the weights themselves."""
        self._group.call("save_average", folder)

    def table(self) -> list[Any]:
        table: list[Any] = self._group.call("table")[0]
        return table


class RemoteCritic:
    """The critic over ranks: its own, or the policy's."""

    def __init__(self, ranks: Ranks, steps: Steps) -> None:
        self._ranks = ranks
        self._steps = steps

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """One array of [T] per sample: what is expected from each sampled token on; 0 elsewhere."""
        found = self._ranks.ask("values", samples)
        return [found[number] for number in range(len(samples))]

    def update(self, experience: Experience, *, step: int) -> Metrics:
        return reduce(self._ranks.teach("update_values", self._steps.of(experience, step)))

    def save_checkpoint(self, folder: Path) -> None:
        self._ranks.group.call("save_critic_checkpoint", folder)

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """As `RemotePolicy.checkpoint_damage`, of the critic's part."""
        return _damage(self._ranks.group, folder)

    def load_checkpoint(self, folder: Path) -> None:
        self._ranks.group.call("load_critic_checkpoint", folder)

    def follow(self, share: float) -> None:
        """As `RemotePolicy.follow`; in the policy's processes both follow whoever is asked."""
        self._ranks.group.call("follow", share)

    def save_model(self, folder: Path) -> None:
        """A folder that a reward model or another critic can start from."""
        self._ranks.group.call("save_critic", folder)


def _damage(group: WorkerGroup, folder: Path) -> list[str]:
    return [line for lines in group.call("checkpoint_damage", folder) for line in lines]


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
