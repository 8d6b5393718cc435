"""The reinforcement-learning algorithm."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from vlmrl.config.base import (
    ConflictError,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    known_or_own,
)
from vlmrl.config.built_in import (
    CRITIC_ESTIMATORS,
    DISCOUNTING_ESTIMATORS,
    ESTIMATORS,
    POLICY_LOSSES,
    Aggregation,
    Estimator,
    quoted,
)

_TITLES = ", ".join(f"`{name}` ({row.title})" for name, row in ESTIMATORS.items())
_DISCOUNTING = quoted(DISCOUNTING_ESTIMATORS)
_AGGREGATIONS = ", ".join(
    f"`{row.aggregation}` for {name}"
    for name, row in (*POLICY_LOSSES.items(), *ESTIMATORS.items())
    if row.aggregation not in (None, "token")
)
Correction = Literal["tis", "icepop", "seq-mask-tis"]
CORRECTION_RANGES: dict[Correction, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "seq-mask-tis": (0.5, 5.0),
}
"""The range of each correction's ratio where none is given; truncated importance sampling bounds it from above only."""


class Advantage(Section):
    """From rewards to advantages."""

    estimator: Text = Field(default="group_norm", description=f"{_TITLES}, or your own, `path/to/file.py:function`.")
    gamma: Fraction = Field(default=1.0, description=f"Discount; read by {_DISCOUNTING}, 1 for the others.")
    lambd: Fraction = Field(
        default=1.0,
        description=f"{quoted(CRITIC_ESTIMATORS)}: how far the critic is trusted; 1 is the return itself, 0 the "
        "critic's next value (arXiv:1506.02438).",
    )
    no_std_norm: bool = Field(
        default=False, description=f"{_DISCOUNTING}: subtract the step's mean but do not divide by its deviation."
    )
    is_correction_enable: bool = False
    """Weigh tokens by how much likelier trainer than engine thinks them, or leave out those where both disagree."""
    is_correction_type: Correction = "tis"
    """What a token's loss is multiplied by, of the ratio of its probabilities in trainer and engine. `tis` (truncated
    importance sampling): the ratio, at most the upper bound; `icepop`: the ratio inside the range, 0 outside, token by
    token; `seq-mask-tis`: 0 for the whole response when the geometric mean of its ratios is outside the range, else
    each ratio clipped to it."""
    is_correction_threshold: tuple[NonNegativeFloat, PositiveFloat] | None = None
    """The range of the ratio; by default 0 2 for `tis`, 0.5 5 for `icepop` and `seq-mask-tis`. With `tis` a lower bound
    above 0 raises the weight of tokens that the trainer finds less probable than the engine."""

    @field_validator("estimator")
    @classmethod
    def check_estimator(cls, estimator: str) -> str:
        return known_or_own(estimator, ESTIMATORS, "estimator")

    @property
    def built_in(self) -> Estimator | None:
        """The estimator's row; None for the user's own function."""
        return ESTIMATORS.get(self.estimator)

    @model_validator(mode="after")
    def check_threshold(self) -> Self:
        low, high = self.correction_range
        if low >= high:
            raise ConflictError(
                [f"algo.advantage.is_correction_threshold {low:g} {high:g} is empty: give the smaller bound first"]
            )
        return self

    @property
    def correction_range(self) -> tuple[float, float]:
        """The bounds of the ratio, those of its kind where none are given."""
        return self.is_correction_threshold or CORRECTION_RANGES[self.is_correction_type]


class Kl(Section):
    """The KL penalty against the reference model."""

    init_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty. 0 means that no reference model exists."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence (joschu.net/blog/kl-approx.html)."""
    use_loss: bool = False
    """Put the KL into the loss instead of the reward; wants `k2` or `k3`."""
    target: PositiveFloat | None = None
    """Let the coefficient follow the KL to this value (arXiv:1909.08593); by default it stays as it is."""
    horizon: PositiveInt = 10_000
    """Answers over which the coefficient follows `target`."""
    early_stop: PositiveFloat | None = None
    """Leave out the rest of an update once the samples of its next optimizer step show the policy further than this
    from the one that made the experience (k3, mean over tokens). It takes each step but the first one pass more."""

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
    """The KL penalty against the reference model."""
    loss_agg: Aggregation | None = Field(
        default=None,
        description="What a token weighs: `token`, `sequence` or `constant`; by default what the paper uses: "
        f"{_AGGREGATIONS}, else `token`.",
    )
    dynamic_filtering_enable: bool = False
    """Keep only groups that teach, those whose responses are worth different amounts after shaping, and draw prompts
    until a batch is full (DAPO, arXiv:2503.14476). For estimators that compare responses within a group."""
    dynamic_filtering_range: tuple[float, float] | None = None
    """Keep a group only if, on top, its mean total reward is strictly between these two, in the units of the rewards
    before shaping. None asks for nothing more."""
    dynamic_filtering_max_draws: PositiveInt = 10
    """The run ends when a batch is not full after so many draws of `rollout.batch_size` prompts: well, with all models
    saved, where most groups that taught nothing were solved; else with an error and a checkpoint."""

    @model_validator(mode="after")
    def check_range(self) -> Self:
        if self.dynamic_filtering_range is None:
            return self
        low, high = self.dynamic_filtering_range
        if low >= high:
            raise ConflictError(
                [f"algo.dynamic_filtering_range {low:g} {high:g} keeps no group: give the smaller bound first"]
            )
        return self
