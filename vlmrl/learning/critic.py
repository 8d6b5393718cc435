"""The critic: values of a response's states, and optimizer steps towards the returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vlmrl.algorithms.aggregation import token_mean
from vlmrl.algorithms.losses import value_loss
from vlmrl.data.experience import Experience
from vlmrl.data.packing import Pack
from vlmrl.learning.base import PackLoss, TrainableModel
from vlmrl.learning.checkpoint import save_adapter, save_model
from vlmrl.learning.forward import RowsAndMetrics, ValueForward, read_value_model
from vlmrl.learning.settings import CriticSettings
from vlmrl.models.value_head import ValueModel
from vlmrl.observe.metrics import Mean, Metric, merge
from vlmrl.types import Totals

_MOMENTS = ("count", "returns", "returns_squared", "errors", "errors_squared")
"""Sums over sampled tokens, from which the explained variance is computed."""


class Critic(TrainableModel):
    """The value model. Its methods are collectives but `critic_table` and `memory`."""

    _area = "value"
    _section = "critic"
    _forward: ValueForward

    def __init__(self, settings: CriticSettings) -> None:
        """A model without a value head gets a new one, initialized from `settings.loop.seed`."""
        critic, columns, loop = settings.critic, settings.columns, settings.loop
        ds = settings.ds.model_copy(update={"zero_stage": critic.zero_stage})
        model = critic.as_model
        super().__init__(
            lambda where: read_value_model(
                model, ds=ds, columns=columns, where=where, head_seed=loop.seed, flag="critic.model_name_or_path"
            ),
            model=model,
            ds=ds,
            loop=loop,
            adapter=settings.adapter,
        )
        _unfreeze_head(self._net)
        value_model = ValueModel(self._net, self._sequence)
        options = self._start_engine(value_model, total_steps=settings.total_steps, vision=settings.vision)
        self._forward = ValueForward(value_model, self._processor, **options)
        self._clip = critic.value_clip

    def values(self, packs: Sequence[Pack]) -> RowsAndMetrics:
        """Values under the current weights: (id, [T]) for each sample with a non-negative id, and pass metrics.

        Each sampled token holds the value of the state before it; other tokens hold 0.
        """
        return self._forward.values(packs), self._forward.take_counts()

    def update_values(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        """Take one optimizer step per element of `work`, as `Policy.update` does. Experiences have values and returns.

        Raises VlmrlError when the loss or the gradient is not finite.
        """
        with self._optimizer_awake():
            return [self._update_once(packs, total) for packs, total in zip(work, totals, strict=True)]

    def _update_once(self, packs: Sequence[tuple[Pack, Experience]], total: Totals) -> dict[str, Metric]:
        self._set_progress(packs[0][1].span)
        shares, moments = [], torch.zeros(len(_MOMENTS), dtype=torch.float64)
        of_rank = [pack for pack, _ in packs]
        for n, (pack, experience) in enumerate(packs, start=1):
            shares.append(self._backward(self._value_loss(pack, experience, total), pack, number=n, of=of_rank))
            moments += _moments(experience)
        explained = explained_variance(*self._sum_over_ranks(moments.tolist()))
        variance: dict[str, Metric] = {} if explained is None else {"value/explained_variance": Mean(explained)}
        return merge([*shares, self._step(), variance])

    def save_critic_checkpoint(self, folder: Path) -> None:
        """Write the full training state, from which `load_critic_checkpoint` resumes bit for bit."""
        self._save_state(folder, {})

    def load_critic_checkpoint(self, folder: Path) -> None:
        """Resume from a checkpoint, random states included.

        Raises ConfigError when the checkpoint is of another model, number of ranks or ZeRO stage.
        """
        self._load_state(folder)

    def save_critic(self, folder: Path) -> None:
        """Write a model that `models.value_head.value_net` loads, and `critic.model_name_or_path` may name.

        With an adapter, write only the adapter and the value head; `vlmrl merge` turns them into such a model.
        """
        if self._adapted is None:
            save_model(self._net, self._processor, Path(folder))
        else:
            save_adapter(self._net, self._adapted, Path(folder))

    def critic_table(self) -> list[Any]:
        """Rows (part of the model, trainable parameters, all parameters)."""
        return self._table

    def _value_loss(self, pack: Pack, experience: Experience, total: Totals) -> PackLoss:
        assert experience.returns is not None, "a critic learns from returns"
        assert experience.values is not None, "a critic clips around the values of the experience"
        sampled = self._place(pack, [s.sampled for s in pack.samples], fill=False)
        losses, clipped = value_loss(
            self._forward(pack).float(),
            self._place(pack, experience.values, fill=0.0),
            self._place(pack, experience.returns, fill=0.0),
            clip=self._clip,
        )
        share = token_mean(losses, sampled, num_tokens=total.num_tokens)
        return share, {"clipped": (clipped & sampled).sum(), "tokens": sampled.sum()}

    def _pack_metrics(self, sums: dict[str, float], pack: Pack) -> dict[str, Metric]:
        return {"value/clip_fraction": Mean(sums["clipped"], sums["tokens"])}


def explained_variance(
    count: float, returns: float, returns_squared: float, errors: float, errors_squared: float
) -> float | None:
    """Compute 1 - Var(G - V) / Var(G) from sums over tokens: 1 for exact values, 0 for values that are all the mean.

    None when all returns are equal: there is no variance to explain.
    """
    if not count:
        return None
    variance = returns_squared / count - (returns / count) ** 2
    # A variance below this is rounding error of the difference of two sums.
    if variance <= 1e-9 * returns_squared / count:
        return None
    return 1.0 - (errors_squared / count - (errors / count) ** 2) / variance


def _moments(experience: Experience) -> torch.Tensor:
    """[5] in the order of `_MOMENTS`, of the values that the returns were computed from."""
    assert experience.returns is not None
    assert experience.values is not None
    total = torch.zeros(len(_MOMENTS), dtype=torch.float64)
    for sample, returns, values in zip(experience.samples, experience.returns, experience.values, strict=True):
        mask = torch.from_numpy(sample.sampled)
        targets = torch.from_numpy(returns)[mask].double()
        errors = targets - torch.from_numpy(values)[mask].double()
        sums = [targets.sum(), targets.square().sum(), errors.sum(), errors.square().sum()]
        total += torch.stack([mask.sum().double(), *sums])
    return total


def _unfreeze_head(net: PreTrainedModel) -> None:
    """Train the value head: it may be new, and adding an adapter froze it."""
    net.score.requires_grad_(True)
