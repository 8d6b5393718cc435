"""The reinforcement-learning algorithm."""

from typing import Literal, Self

from pydantic import model_validator

from vlmrl.config.base import ConflictError, Fraction, NonNegativeFloat, Section

Estimator = Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline"]
Aggregation = Literal["token", "sequence", "constant"]


class Advantage(Section):
    """From rewards to advantages."""

    estimator: Estimator = "group_norm"
    """`group_norm` (GRPO), `dr_grpo`, `rloo`, or `reinforce_baseline` (REINFORCE++ with a group baseline)."""
    gamma: Fraction = 1.0
    """Discount; read by `reinforce_baseline` alone, 1 for the group estimators."""
    no_std_norm: bool = False
    """`reinforce_baseline`: subtract the batch mean but do not divide by the batch deviation."""


class Kl(Section):
    """The leash to the reference model."""

    init_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty. 0 means that no reference model exists."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence (joschu.net/blog/kl-approx.html)."""
    use_loss: bool = False
    """Put the KL into the loss instead of the reward; wants `k2` or `k3`."""

    @model_validator(mode="after")
    def check_gradient(self) -> Self:
        if self.use_loss and self.estimator == "k1":
            raise ConflictError(
                ["algo.kl.estimator k1 has no useful gradient in the loss: use k2 or k3, or leave algo.kl.use_loss off"]
            )
        return self


class Algo(Section):
    """The algorithm."""

    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    kl: Kl = Kl()
    """The leash to the reference model."""
    loss_agg: Aggregation | None = None
    """What a token weighs: `token`, `sequence` or `constant`; by default what the estimator's paper uses."""

    @property
    def aggregation(self) -> Aggregation:
        """`loss_agg`, or what the estimator's paper uses: `constant` for dr_grpo (arXiv:2503.20783), else `token`."""
        if self.loss_agg is not None:
            return self.loss_agg
        return "constant" if self.advantage.estimator == "dr_grpo" else "token"
