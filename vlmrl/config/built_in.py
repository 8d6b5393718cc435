"""The built-in estimators, policy losses and reward functions: one row each, the only list of their names.

A row has the name of its implementation: a function in `algorithms/estimators.py` or `algorithms/policy_losses.py`, or
a file in `rewards/`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorRow:
    """An advantage estimator."""

    title: str
    """The name of the algorithm in the literature."""
    needs_critic: bool = False
    discounts: bool = False
    """Advantages are discounted, and normalised over all sampled tokens of a step."""
    compares_group: bool = False
    """The baseline comes from the other responses to the same prompt."""
    aggregation: Aggregation = "token"
    """The aggregation of the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossRow:
    """A policy loss."""

    title: str
    clip_range: tuple[float, float] | None = None
    """The clip range of the paper, below and above 1; None: `actor.eps_clip`."""
    has_dual_clip: bool = False
    weighs_responses: bool = False
    """The probability ratio is that of a whole response."""
    aggregation: Aggregation | None = None
    """The aggregation of the paper; None: the estimator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunctionRow:
    """A reward function."""

    needs_label: bool
    checks_response: bool
    """The score says whether a response is correct. Evaluation uses the first such function of the run."""


ESTIMATORS = {
    "gae": EstimatorRow(title="PPO with a critic", needs_critic=True, discounts=True),
    "reinforce": EstimatorRow(title="REINFORCE++", discounts=True),
    "reinforce_baseline": EstimatorRow(title="REINFORCE++ with a group baseline", discounts=True, compares_group=True),
    "rloo": EstimatorRow(title="RLOO", compares_group=True),
    "group_norm": EstimatorRow(title="GRPO", compares_group=True),
    "dr_grpo": EstimatorRow(title="Dr. GRPO", compares_group=True, aggregation="constant"),
}

POLICY_LOSSES = {
    "ppo": PolicyLossRow(title="the clipped surrogate, arXiv:1707.06347", has_dual_clip=True),
    "gspo": PolicyLossRow(
        title="one ratio per response, arXiv:2507.18071",
        clip_range=(3e-4, 4e-4),  # section 5.1 of the paper
        weighs_responses=True,
        aggregation="sequence",
    ),
    "cispo": PolicyLossRow(title="clips weights and no gradient, arXiv:2506.13585"),
}

REWARD_FUNCTIONS = {
    "math": RewardFunctionRow(needs_label=True, checks_response=True),
    "exact": RewardFunctionRow(needs_label=True, checks_response=True),
    "format": RewardFunctionRow(needs_label=False, checks_response=False),
}

CRITIC_ESTIMATORS = tuple(name for name, row in ESTIMATORS.items() if row.needs_critic)
DISCOUNTING_ESTIMATORS = tuple(name for name, row in ESTIMATORS.items() if row.discounts)
GROUP_ESTIMATORS = tuple(name for name, row in ESTIMATORS.items() if row.compares_group)
DUAL_CLIP_LOSSES = tuple(name for name, row in POLICY_LOSSES.items() if row.has_dual_clip)


def quoted(names: Iterable[str]) -> str:
    """Format names for help texts: "`a`, `b`"."""
    return ", ".join(f"`{name}`" for name in names)
