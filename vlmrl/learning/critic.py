"""The model that learns what an answer will be worth: a value for each state of it, and steps towards the returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vlmrl.algorithms.aggregation import token_mean
from vlmrl.algorithms.losses import value_loss
from vlmrl.data.packing import Pack
from vlmrl.learning.base import Learner, Share
from vlmrl.learning.checkpoint import save_adapter, save_model
from vlmrl.learning.forward import Scored, ValueForward, read_value_model
from vlmrl.learning.settings import CriticSettings
from vlmrl.models.value_head import Valuer
from vlmrl.observe.metrics import Mean, Metric, merge
from vlmrl.types import Experience, Totals

_MOMENTS = ("count", "returns", "returns_squared", "errors", "errors_squared")
"""What the explained variance is made of, as sums over sampled tokens."""


class Critic(Learner):
    """One per rank. Every method but `critic_table` and `memory` is a collective: call it on all ranks, in the same
    order.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this is; without them it is alone.
    """

    _area = "value"
    _section = "critic"
    _forward: ValueForward

    def __init__(self, settings: CriticSettings) -> None:
        """A model without a head gets one drawn from `settings.loop.seed`."""
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
        _thaw_head(self._net)
        valuer = Valuer(self._net)
        passing = self._begin(valuer, total_steps=settings.total_steps, vision=settings.vision)
        self._forward = ValueForward(valuer, self._processor, **passing)
        self._clip = critic.value_clip

    def values(self, packs: Sequence[Pack]) -> Scored:
        """(id, [T]) of each sample with an id of 0 or more, and what it took.

        Where a token was sampled stands what the state before it is worth, under the weights of now; elsewhere 0.
        """
        return self._forward.values(packs), self._forward.take_counts()

    def update_values(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        """Take one optimizer step per element of `work`; see `Policy.update`. Experiences have values and returns.

        Raises VlmrlError when the loss or the gradient is not a number.
        """
        with self._optimizer_awake():
            return [self._update_once(packs, total) for packs, total in zip(work, totals, strict=True)]

    def _update_once(self, packs: Sequence[tuple[Pack, Experience]], total: Totals) -> dict[str, Metric]:
        self._follow(packs[0][1].span)
        shares, moments = [], torch.zeros(len(_MOMENTS), dtype=torch.float64)
        for n, (pack, experience) in enumerate(packs, start=1):
            shares.append(self._backward(self._value_loss(pack, experience, total), pack, is_last=n == len(packs)))
            moments += _moments(experience)
        explained = explained_variance(*self._sum_over_ranks(moments.tolist()))
        told: dict[str, Metric] = {} if explained is None else {"value/explained_variance": Mean(explained)}
        return merge([*shares, self._step(), told])

    def save_critic_checkpoint(self, folder: Path) -> None:
        """Everything that `load_critic_checkpoint` needs to go on as if nothing had happened."""
        self._save_state(folder, {})

    def load_critic_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint, random numbers included.

        Raises ConfigError when it is not a checkpoint of this model, these ranks and this ZeRO stage.
        """
        self._load_state(folder)

    def save_critic(self, folder: Path) -> None:
        """A folder that `models.value_head.value_net` loads: what `critic.model_name_or_path` may name.

        With an adapter, one with that and the head alone, which `vlmrl merge` makes such a model of.
        """
        if self._adapted is None:
            save_model(self._net, self._processor, Path(folder))
        else:
            save_adapter(self._net, self._adapted, Path(folder))

    def critic_table(self) -> list[Any]:
        """(part of the model, trainable parameters, all parameters)."""
        return self._table

    def _value_loss(self, pack: Pack, experience: Experience, total: Totals) -> Share:
        """This pack's share of the step's loss, and sums over its sampled tokens."""
        assert experience.returns is not None, "a critic learns from returns"
        assert experience.values is not None, "a critic clips by what it said when the experience was made"
        sampled = self._placed(pack, [s.sampled for s in pack.samples], fill=False)
        losses, clipped = value_loss(
            self._forward(pack).float(),
            self._placed(pack, experience.values, fill=0.0),
            self._placed(pack, experience.returns, fill=0.0),
            clip=self._clip,
        )
        share = token_mean(losses, sampled, num_tokens=total.num_tokens)
        return share, {"clipped": (clipped & sampled).sum(), "tokens": sampled.sum()}

    def _measure(self, found: dict[str, float], pack: Pack) -> dict[str, Metric]:
        return {"value/clip_fraction": Mean(found["clipped"], found["tokens"])}


def explained_variance(
    count: float, returns: float, returns_squared: float, errors: float, errors_squared: float
) -> float | None:
    """1 - Var(G - V) / Var(G) from sums over tokens: 1 is a critic that knows, 0 one that says the mean.

    None when the returns are all the same, so that there is nothing to explain.
    """
    if not count:
        return None
    variance = returns_squared / count - (returns / count) ** 2
    # So far the digits of a variance go that is the difference of two sums.
    if variance <= 1e-9 * returns_squared / count:
        return None
    return 1.0 - (errors_squared / count - (errors / count) ** 2) / variance


def _moments(experience: Experience) -> torch.Tensor:
    """[5] in the order of `_MOMENTS`. The values are those that the returns came with: what the critic knew then."""
    assert experience.returns is not None
    assert experience.values is not None
    total = torch.zeros(len(_MOMENTS), dtype=torch.float64)
    for sample, returns, values in zip(experience.samples, experience.returns, experience.values, strict=True):
        mask = torch.from_numpy(sample.sampled)
        found = torch.from_numpy(returns)[mask].double()
        errors = found - torch.from_numpy(values)[mask].double()
        sums = [found.sum(), found.square().sum(), errors.sum(), errors.square().sum()]
        total += torch.stack([mask.sum().double(), *sums])
    return total


def _thaw_head(net: PreTrainedModel) -> None:
    """An adapter freezes everything else, and the head is what says values at all."""
    net.score.requires_grad_(True)
