"""Optimizer steps on preferences, for the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vlmrl.algorithms.aggregation import token_mean
from vlmrl.algorithms.preference_loss import Responses, pair_losses, rewards, unpaired_losses
from vlmrl.algorithms.preferences import response_sums
from vlmrl.data.packing import Pack
from vlmrl.data.preference_step import PreferenceStep
from vlmrl.learning.base import PackLoss, TrainableModel
from vlmrl.learning.forward import LogprobForward
from vlmrl.observe.metrics import Mean, Metric, merge


class PreferenceLearner(TrainableModel):
    """A model that learns from preferences."""

    _forward: LogprobForward

    def fit_preferences(self, packs: Sequence[Pack], step: PreferenceStep) -> dict[str, Metric]:
        """Take one optimizer step on this rank's packs, which hold both responses of each of their pairs.

        The gradient does not depend on how the pairs are spread over packs and ranks. Raises VlmrlError when the loss
        or the gradient is not finite.
        """
        with self._optimizer_awake():
            shares = [
                self._backward(self._preference_loss(pack, step), pack, number=n, of=packs)
                for n, pack in enumerate(packs, start=1)
            ]
            return merge([*shares, self._step()])

    def _preference_loss(self, pack: Pack, step: PreferenceStep) -> PackLoss:
        output = self._forward(pack)
        # By id, so that the chosen response of a pair comes before the rejected one; fillers have none.
        order = sorted((i, place) for place, i in enumerate(pack.ids) if i >= 0)
        ids, number = [i for i, _ in order], {place: n for n, (_, place) in enumerate(order)}
        sampled = self._place(pack, [sample.sampled for sample in pack.samples], fill=False)
        owners = [np.full(len(sample.tokens), number.get(place, 0)) for place, sample in enumerate(pack.samples)]
        owner = self._place(pack, owners, fill=0)
        logprobs = output.logprobs.float()
        lengths = [float(pack.samples[place].sampled.sum()) for _, place in order]
        policy = Responses(
            response_sums(logprobs, sampled, owner, num_responses=len(ids)), logprobs.new_tensor(lengths)
        )
        reference = logprobs.new_tensor(step.reference[ids])
        if step.desirable is None:
            desirable = torch.arange(len(ids), device=self._device) % 2 == 0
            losses = pair_losses(step.settings, policy, reference, step.offsets)
        else:
            desirable = torch.from_numpy(step.desirable[ids]).to(self._device)
            losses = unpaired_losses(step.settings, policy, reference, desirable, step.offsets)
        share = losses.sum() / step.num_losses
        is_chosen = sampled & desirable[owner] if ids else sampled
        if step.settings.nll_coef > 0:
            share = share + step.settings.nll_coef * token_mean(-logprobs, is_chosen, num_tokens=step.num_chosen_tokens)
        with torch.no_grad():
            sums = {
                "entropy": torch.where(sampled, output.entropy.float(), 0.0).sum(),
                "tokens": sampled.sum(),
                "nll": torch.where(is_chosen, -logprobs, 0.0).sum(),
                "chosen_tokens": is_chosen.sum(),
                **_sums(policy.sums, rewards(step.settings, policy, reference), desirable),
            }
            if step.desirable is None:
                sums |= _pair_sums(rewards(step.settings, policy, reference))
        return share, sums


def _sums(logprobs: Tensor, values: Tensor, desirable: Tensor) -> dict[str, Tensor]:
    """Sums over chosen and over rejected responses, and their numbers."""
    return {
        "chosen": desirable.sum(),
        "rejected": (~desirable).sum(),
        "reward_chosen": values[desirable].sum(),
        "reward_rejected": values[~desirable].sum(),
        "logprob_chosen": logprobs[desirable].sum(),
        "logprob_rejected": logprobs[~desirable].sum(),
    }


def _pair_sums(values: Tensor) -> dict[str, Tensor]:
    margins = values[0::2] - values[1::2]
    # Equal rewards tell nothing: they count as half right.
    return {"margin": margins.sum(), "right": (margins > 0).sum() + 0.5 * (margins == 0).sum()}


def preference_metrics(sums: dict[str, float]) -> dict[str, Metric]:
    """Metrics of a pack's preferences."""
    metrics: dict[str, Metric] = {
        "dpo/nll": Mean(sums["nll"], sums["chosen_tokens"]),
        "dpo/reward_chosen": Mean(sums["reward_chosen"], sums["chosen"]),
        "dpo/reward_rejected": Mean(sums["reward_rejected"], sums["rejected"]),
        "dpo/logprob_chosen": Mean(sums["logprob_chosen"], sums["chosen"]),
        "dpo/logprob_rejected": Mean(sums["logprob_rejected"], sums["rejected"]),
    }
    if "margin" in sums:
        metrics |= {
            "dpo/margin": Mean(sums["margin"], sums["chosen"]),
            "dpo/accuracy": Mean(sums["right"], sums["chosen"]),
        }
    return metrics
