"""Group baselines: compare the responses of a group, or their reasoning steps, with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmrl.algorithms.signal import has_signal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_FP32_ROUNDING = 1e-6
"""Relative rounding error of fp32."""


def subtract_group_mean(
    rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"] | None = None
) -> Float[Tensor, "N G"]:
    """`R - mean_j R`: the baseline of Dr. GRPO (arXiv:2503.20783) and of REINFORCE++ with a group baseline.

    Groups without signal are exactly 0: the rounding error of a mean must not become a gradient, especially after
    division by an equally small standard deviation. Responses that are not `scored` are excluded from the mean, and 0;
    None: all are scored.
    """
    scored = _all_scored(rewards) if scored is None else scored
    count = scored.sum(dim=1, keepdim=True).clamp(min=1)
    mean = rewards.masked_fill(~scored, 0.0).sum(dim=1, keepdim=True) / count
    return torch.where(scored & has_signal(rewards, scored=scored)[:, None], rewards - mean, 0.0)


def normalize_by_group(
    rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"] | None = None
) -> Float[Tensor, "N G"]:
    """`(R - mean_j R) / (std_j R + 1e-6)` over the `scored`, with the unbiased deviation (GRPO, arXiv:2402.03300)."""
    scored = _all_scored(rewards) if scored is None else scored
    centred = subtract_group_mean(rewards, scored)
    degrees_of_freedom = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    return centred / ((centred.square().sum(dim=1, keepdim=True) / degrees_of_freedom).sqrt() + 1e-6)


def subtract_mean_of_others(
    rewards: Float[Tensor, "N G"], scored: Bool[Tensor, "N G"] | None = None
) -> Float[Tensor, "N G"]:
    """`R` minus the mean of the other `scored` responses of the group (RLOO, arXiv:2402.14740)."""
    scored = _all_scored(rewards) if scored is None else scored
    others = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    mean_of_others = (rewards.masked_fill(~scored, 0.0).sum(dim=1, keepdim=True) - rewards) / others
    return torch.where(scored & has_signal(rewards, scored=scored)[:, None], rewards - mean_of_others, 0.0)


def _all_scored(rewards: Float[Tensor, "N G"]) -> Bool[Tensor, "N G"]:
    return torch.ones_like(rewards, dtype=torch.bool)


def step_advantages(
    token_rewards: Float[Tensor, "B T"], *, group_size: int, divide_by_std: bool
) -> Float[Tensor, "B T"]:
    """Compare the rewards of reasoning steps with those of all steps of the group (arXiv:2402.03300, section 4.1.3).

    A step is a token whose reward is not 0: the step's score divided by the number of steps of its response. From the
    scores, the mean over the group's steps is subtracted; `divide_by_std` also divides by their unbiased standard
    deviation + 1e-6. The results are divided by the number of steps again, so that responses do not gain or lose by
    having many steps. Equal steps are exactly 0.
    """
    is_step = token_rewards != 0
    num_steps = is_step.sum(dim=1, keepdim=True).clamp(min=1)
    token_rewards = token_rewards * num_steps

    def reduce_group(per_response: Float[Tensor, " B"], combine: Callable[[Tensor], Tensor]) -> Float[Tensor, "B 1"]:
        return combine(per_response.reshape(-1, group_size)).repeat_interleave(group_size)[:, None]

    def group_sum(per_token: Float[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
        return reduce_group(per_token.sum(dim=1), lambda responses: responses.sum(dim=1))

    highest = reduce_group(token_rewards.amax(dim=1), lambda responses: responses.amax(dim=1))
    lowest = reduce_group(token_rewards.amin(dim=1), lambda responses: responses.amin(dim=1))
    # Relative to one of the steps: the rounding error of a mean must not become the gradient of equal steps.
    origin = torch.where(highest > 0, highest, lowest).double()
    counts = group_sum(is_step)
    centred = (token_rewards - origin).masked_fill_(~is_step, 0.0)
    centred.masked_fill_(centred.abs() <= _FP32_ROUNDING * origin.abs(), 0.0)
    centred.sub_(group_sum(centred) / counts.clamp(min=1)).masked_fill_(~is_step, 0.0)
    if divide_by_std:
        variance = group_sum(centred.square()) / (counts - 1).clamp(min=1)
        centred.div_(variance.sqrt() + 1e-6)
    return centred.div_(num_steps)
