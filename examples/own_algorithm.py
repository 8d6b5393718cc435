"""A custom estimator and policy loss: functions of tensors, which get the arguments that they declare by name."""

import torch


def best_of_group(rewards: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [N, G]: only responses above the mean of their group count; an estimator may return [B, T] too.

    It may declare rewards, scored, sampled, values, penalty, token_rewards.
    """
    return (rewards - rewards.mean(dim=1, keepdim=True)).clamp(min=0.0)


def squared_ratio(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_high: float
) -> torch.Tensor:
    """[B, T]: a policy gradient held near the old policy by the square of the log-ratio instead of by a clip.

    It may declare logprobs, old, rollout, advantages, sampled, owner, clip_low, clip_high.
    """
    log_ratio = logprobs - old
    return -log_ratio.exp() * advantages + log_ratio.square() / (2.0 * clip_high)
