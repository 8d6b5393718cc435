"""An estimator and a policy loss of one's own: functions of tensors, given by name what they declare, named in YAML."""

import torch


def best_of_group(rewards: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [N, G]: only an answer that beats the mean of its group counts; an estimator may return [B, T] too.

    What it may declare: rewards, sampled, values, penalty, token_rewards.
    """
    return (rewards - rewards.mean(dim=1, keepdim=True)).clamp(min=0.0)


def squared_ratio(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_high: float
) -> torch.Tensor:
    """[B, T]: a policy gradient held near the old policy by the square of the log-ratio instead of by a clip.

    What it may declare: logprobs, old, rollout, advantages, sampled, owner, clip_low, clip_high.
    """
    log_ratio = logprobs - old
    return -log_ratio.exp() * advantages + log_ratio.square() / (2.0 * clip_high)
