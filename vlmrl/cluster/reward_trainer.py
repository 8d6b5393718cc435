"""A reward model in training, over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.learners import packing_plan
from vlmrl.cluster.models import PassMetrics, Ranks
from vlmrl.cluster.role_settings import reward_trainer_settings
from vlmrl.cluster.sequence_groups import each_group
from vlmrl.config.stages import RmConfig
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.observe.metrics import reduce
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Metrics, Sample

if TYPE_CHECKING:
    from vlmrl.learning.reward_trainer import RewardTrainer


def start_reward_trainer(
    builder: RoleBuilder,
    config: RmConfig,
    processor: Processor,
    *,
    adapter: AdapterPlan | None,
    num_rows: int,
    say: Callable[[str], None],
) -> RemoteRewardTrainer:
    """Start the ranks of the reward model. `num_rows` counts the training data."""
    settings, loop = reward_trainer_settings(config, adapter, num_rows), config.train
    group = builder.group("actor", settings.build, timeout_s=loop.timeout_s, distributed=True)
    size = config.ds.sequence_parallel_size
    packing = packing_plan(group, loop, processor, say, sequence_size=size)
    return RemoteRewardTrainer(Ranks(group, packing, loop.max_tokens_per_gpu, PassMetrics(), size))


class RemoteRewardTrainer:
    """The reward model over ranks. Pairs are samples 2i, the chosen response, and 2i + 1, the rejected one."""

    def __init__(self, ranks: Ranks[RewardTrainer]) -> None:
        self.ranks = ranks
        self._group = ranks.group
        self.responses_of_scale: Sequence[Sample] = ()
        """Responses whose scores give the mean and deviation that `save_model` stores; without any, none are stored."""

    def fit_pairs(self, samples: Sequence[Sample], margins: Sequence[float]) -> Metrics:
        """Take one optimizer step on pairs of responses; return its metrics."""
        # A pair stays in one pack, as the segments of one response do.
        paired = [replace(sample, response=number // 2) for number, sample in enumerate(samples)]
        packs = self.ranks.packing.spread(paired, self.ranks.num_groups, whole_responses=True)
        return reduce(each_group(self._group, lambda trainer, share: trainer.fit_pairs(share, margins), packs))

    def fit_steps(self, samples: Sequence[Sample], labels: Sequence[Floats]) -> Metrics:
        """Take one optimizer step on labels of steps, [T] per sample; return its metrics."""
        packs, by_id = self.ranks.packing.spread(samples, self.ranks.num_groups), dict(enumerate(labels))
        return reduce(each_group(self._group, lambda trainer, share: trainer.fit_steps(share, by_id), packs))

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of each response."""
        scores = self.ranks.forward(lambda trainer, packs: trainer.scores(packs), samples)
        self.ranks.pass_metrics.take()  # not part of a step
        return scores

    def step_odds(self, samples: Sequence[Sample], labels: Sequence[Floats]) -> list[Floats]:
        """Return the log-odds of the labelled steps of each sample, in order; `labels` are as in `fit_steps`."""
        by_id = dict(enumerate(labels))
        rows = self.ranks.forward(lambda trainer, packs: trainer.values_at(packs, by_id), samples)
        self.ranks.pass_metrics.take()
        return [row[np.isfinite(label)] for row, label in zip(rows, labels, strict=True)]

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        self._group.call(lambda trainer: trainer.save_checkpoint(folder, extra))

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """As `RemotePolicy.checkpoint_damage`."""
        by_rank = self._group.call(lambda trainer: trainer.checkpoint_damage(folder))
        return [line for lines in by_rank for line in lines]

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        return self._group.call(lambda trainer: trainer.load_checkpoint(folder))[0]

    def set_progress(self, share: float) -> None:
        """As `RemotePolicy.set_progress`."""
        self._group.call(lambda trainer: trainer.set_progress(share))

    def save_model(self, folder: Path) -> None:
        """Write the whole model, with adapters merged, and the mean and deviation of its scores."""
        scale = self._scale()
        self._group.call(lambda trainer: trainer.save_model(folder, scale))

    def save_average(self, folder: Path) -> None:
        raise AssertionError("a reward model in training keeps no moving average")

    def table(self) -> list[Any]:
        return self._group.call(lambda trainer: trainer.table())[0]

    def _scale(self) -> tuple[float, float] | None:
        if not self.responses_of_scale:
            return None
        scores = np.array(self.scores(self.responses_of_scale), dtype=np.float64)
        # Equal scores have no unit, and dividing by 0 is refused by `reward.normalize_enable`.
        return (float(scores.mean()), float(scores.std())) if scores.std() > 0 else None
