"""A custom estimator and policy loss: functions of tensors that receive the arguments they declare by name."""

import torch


def best_of_group(rewards: torch.Tensor) -> torch.Tensor:
    """Reinforce only the responses above the mean of their group: [N, G] -> [N, G].

    An estimator may declare rewards, scored, sampled, values, kl_penalty, token_rewards, and may also return [B, T].
    """
    return (rewards - rewards.mean(dim=1, keepdim=True)).clamp(min=0.0)


def squared_ratio(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_high: float
) -> torch.Tensor:
    """A policy gradient with a squared log-ratio penalty instead of clipping: [B, T] -> [B, T].

    A loss may declare logprobs, old, rollout, advantages, sampled, owner, clip_low, clip_high.
    """
    log_ratio = logprobs - old
    return -log_ratio.exp() * advantages + log_ratio.square() / (2.0 * clip_high)
