"""On-policy distillation: a teacher's log-probs as advantages of the tokens that the policy sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def teacher_gap(
    old: Float[Tensor, "B T"], teacher: Float[Tensor, "B T"], sampled: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """`log pi_teacher - log pi_old` of each sampled token, 0 elsewhere.

    Over the policy's own samples its mean is the negative reverse KL, KL(policy || teacher), and the policy gradient
    with it as advantage is that of the reverse KL of single tokens (arXiv:2306.13649; thinkingmachines.ai, On-Policy
    Distillation). It is the advantage of its own token alone: it is neither summed over later tokens nor discounted.

    A token that the teacher does not have, marked by NaN, has no gap: 0.
    """
    return torch.where(sampled & ~teacher.isnan(), teacher - old, 0.0)


def limited(gap: Float[Tensor, "B T"], max_gap: float | None) -> Float[Tensor, "B T"]:
    """`gap` within `[-max_gap, max_gap]`: a few tokens that the teacher rules out do not decide a step. The sign stays,
    so a token still becomes likelier where the teacher finds it likelier, and a policy like its teacher stays as it is.
    """
    return gap if max_gap is None else gap.clamp(-max_gap, max_gap)
