"""The reinforcement-learning algorithm: estimator, corrections, KL and filtering, and their checks."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from vlmrl.config.actor import Actor, Ref
from vlmrl.config.base import (
    ConflictError,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    Unread,
    check_name,
)
from vlmrl.config.built_in import (
    CRITIC_ESTIMATORS,
    DISCOUNTING_ESTIMATORS,
    DUAL_CLIP_LOSSES,
    ESTIMATORS,
    GROUP_ESTIMATORS,
    POLICY_LOSSES,
    Aggregation,
    EstimatorRow,
    quoted,
)
from vlmrl.config.distill import Distill
from vlmrl.config.names import settings
from vlmrl.config.rollout import Rollout
from vlmrl.config.train import TrainRl
from vlmrl.config.vllm import Vllm

_TITLES = ", ".join(f"`{name}` ({row.title})" for name, row in ESTIMATORS.items())
_DISCOUNTING = quoted(DISCOUNTING_ESTIMATORS)
_AGGREGATIONS = ", ".join(
    f"`{aggregation}` for {name}"
    for name, aggregation in (
        *((name, loss.aggregation) for name, loss in POLICY_LOSSES.items()),
        *((name, estimator.aggregation) for name, estimator in ESTIMATORS.items()),
    )
    if aggregation not in (None, "token")
)
Correction = Literal["tis", "icepop", "seq-mask-tis"]
CORRECTION_RANGES: dict[Correction, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "seq-mask-tis": (0.5, 5.0),
}
"""Default range of each correction's ratio; truncated importance sampling has no lower bound."""


class Advantage(Section):
    """The advantage estimator and the importance correction."""

    estimator: Text = Field(default="group_norm", description=f"{_TITLES}, or your own, `path/to/file.py:function`.")
    gamma: Fraction = Field(default=1.0, description=f"Discount; read by {_DISCOUNTING}, 1 for the others.")
    lambd: Fraction = Field(
        default=1.0,
        description=f"{quoted(CRITIC_ESTIMATORS)}: trade-off between returns (1) and the critic's values (0) "
        "(arXiv:1506.02438).",
    )
    no_std_norm: bool = Field(
        default=False, description=f"{_DISCOUNTING}: subtract the step's mean but do not divide by its deviation."
    )
    is_correction_enable: bool = False
    """Correct the gap between engine and trainer: weight tokens by their probability ratio, or mask those where both
    disagree."""
    is_correction_type: Correction = "tis"
    """Factor of a token's loss, from the ratio of its probabilities in trainer and engine. `tis` (truncated importance
    sampling): the ratio, at most the upper bound; `icepop`: the ratio inside the range, 0 outside, token by token;
    `seq-mask-tis`: 0 for the whole response when the geometric mean of its ratios is outside the range, else each ratio
    clipped to it."""
    is_correction_threshold: tuple[NonNegativeFloat, PositiveFloat] | None = None
    """The range of the ratio; by default 0 2 for `tis`, 0.5 5 for `icepop` and `seq-mask-tis`. With `tis` a lower bound
    above 0 raises the weight of tokens that are less probable in the trainer than in the engine."""

    @field_validator("estimator")
    @classmethod
    def check_estimator(cls, estimator: str) -> str:
        return check_name(estimator, ESTIMATORS, "estimator")

    @property
    def built_in(self) -> EstimatorRow | None:
        """The estimator's row; None for the user's own function."""
        return ESTIMATORS.get(self.estimator)

    @property
    def rewards_turns(self) -> bool:
        """The rewards of an environment's steps are rewards of the tokens that end their turns; else they are added up
        to the reward of the conversation."""
        return self.built_in is not None and not self.built_in.compares_group

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
        """The bounds of the ratio, by default those of its kind."""
        return self.is_correction_threshold or CORRECTION_RANGES[self.is_correction_type]


class Kl(Section):
    """The KL penalty against the reference model."""

    init_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty. 0 turns it off, and there is no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence (joschu.net/blog/kl-approx.html)."""
    use_loss: bool = False
    """Add the KL to the loss instead of the reward; needs `k2` or `k3`."""
    target: PositiveFloat | None = None
    """Adapt the coefficient so that the KL approaches this value (arXiv:1909.08593); by default it is constant."""
    horizon: PositiveInt = 10_000
    """Number of responses over which the coefficient adapts to `target`."""
    early_stop: PositiveFloat | None = None
    """Skip the rest of an update when, on the samples of its next optimizer step, the KL from the policy that made the
    experience exceeds this (k3, mean over tokens). Costs one more pass for each step but the first."""

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
    """The advantage estimator and the importance correction."""
    kl: Kl = Kl()
    """The KL penalty against the reference model."""
    distill: Distill = Distill()
    """On-policy distillation from a teacher."""
    loss_agg: Aggregation | None = Field(
        default=None,
        description="Weight of a token in the loss: `token`, `sequence` or `constant`; by default that of the paper: "
        f"{_AGGREGATIONS}, else `token`.",
    )
    routing_replay: bool = False
    """Mixtures of experts: train with the experts that the engines chose (R3, arXiv:2510.11370), so that both sides
    compute the same function."""
    dynamic_filtering_enable: bool = False
    """Keep only groups whose responses differ in shaped reward, and draw prompts until a batch is full (DAPO,
    arXiv:2503.14476). For estimators that compare responses within a group."""
    dynamic_filtering_range: tuple[float, float] | None = None
    """Also require that a group's mean total reward, before shaping, lies strictly between these bounds. None: no such
    requirement."""
    dynamic_filtering_max_draws: PositiveInt = 10
    """The run ends when a batch is not full after this many draws of `rollout.batch_size` prompts: normally, with all
    models saved, if most of the constant groups were solved; else with an error and a checkpoint."""

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


def conflicts_of_replay(algo: Algo, vllm: Vllm, *, is_async: bool, has_agent: bool) -> list[str]:
    if not algo.routing_replay:
        return []
    conflicts = []
    if has_agent:
        conflicts.append("algo.routing_replay is not built yet for conversations with an environment: turn it off")
    if is_async:
        conflicts.append("algo.routing_replay is not built yet for responses across weight syncs: turn it off")
    if vllm.pipeline_parallel_size > 1:
        conflicts.append(
            "algo.routing_replay: each stage of vllm.pipeline_parallel_size records the experts of its layers: use "
            "vllm.tensor_parallel_size"
        )
    if not vllm.enable_prefix_caching:
        conflicts.append("algo.routing_replay: vLLM records experts only with vllm.enable_prefix_caching: turn that on")
    return conflicts


def unread_of_loss(actor: Actor) -> Unread:
    unread: Unread = {}
    if actor.eps_clip_low_high is not None:
        unread["actor.eps_clip"] = "actor.eps_clip_low_high replaces it"
    elif actor.paper_clip is not None:
        unread["actor.eps_clip"] = (
            f"actor.policy_loss_type {actor.policy_loss_type} clips in its paper's range unless one is given"
        )
    if actor.policy_loss_type not in DUAL_CLIP_LOSSES:
        unread["actor.dual_clip"] = _read_only_with("actor.policy_loss_type", DUAL_CLIP_LOSSES, actor.policy_loss_type)
    return unread


def unread_of_advantage(advantage: Advantage) -> Unread:
    unread: Unread = {}
    setting, estimator = "algo.advantage.estimator", advantage.estimator
    if estimator not in CRITIC_ESTIMATORS:
        unread["algo.advantage.lambd"] = _read_only_with(setting, CRITIC_ESTIMATORS, estimator)
    if estimator not in DISCOUNTING_ESTIMATORS:
        reason = _read_only_with(setting, DISCOUNTING_ESTIMATORS, estimator)
        unread |= {"algo.advantage.gamma": reason, "algo.advantage.no_std_norm": reason}
    if not advantage.is_correction_enable:
        names = ("algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold")
        unread |= dict.fromkeys(names, "algo.advantage.is_correction_enable is off")
    return unread


def unread_of_estimator(algo: Algo, actor: Actor) -> Unread:
    """For a run in which only a teacher grades the responses: the estimator has rewards of 0.

    The user's own estimator may still return advantages, and the estimator of a paper decides how tokens are weighed,
    if no other setting does.
    """
    estimator, loss = algo.advantage.built_in, actor.built_in_loss
    if estimator is None or estimator.needs_critic:  # a critic without rewards is a conflict
        return {}
    names = ["algo.advantage.gamma", "algo.advantage.no_std_norm"]
    is_weighed = algo.loss_agg is not None or (loss is not None and loss.aggregation is not None)
    if is_weighed or estimator.aggregation == "token":
        names.append("algo.advantage.estimator")
    return dict.fromkeys(names, "nothing but algo.distill.teacher_model_name_or_path grades the responses")


def unread_of_kl(algo: Algo) -> Unread:
    if algo.kl.init_coef == 0:
        reason = "algo.kl.init_coef is 0, so there is no reference model"
        names = (f"algo.kl.{name}" for name in ("estimator", "use_loss", "target", "horizon"))
        return dict.fromkeys((*settings(Ref, "ref."), *names, "train.colocate_actor_ref"), reason)
    if algo.kl.target is None:
        return {"algo.kl.horizon": "algo.kl.init_coef is constant without algo.kl.target"}
    return {}


def unread_of_filtering(algo: Algo) -> Unread:
    if algo.dynamic_filtering_enable:
        return {}
    names = ("algo.dynamic_filtering_range", "algo.dynamic_filtering_max_draws")
    return dict.fromkeys(names, "algo.dynamic_filtering_enable is off")


def unread_of_updates(rollout: Rollout, train: TrainRl) -> Unread:
    """Settings that need several optimizer steps per batch of responses."""
    if steps_per_batch(rollout, train) > 1:
        return {}
    reason = "with one optimizer step per batch of responses there is nothing to skip: lower train.batch_size"
    return {"algo.kl.early_stop": reason}


def loss_reads_responses(actor: Actor, advantage: Advantage) -> bool:
    """Whether the loss of a token may depend on all of its response: that of GSPO, of a correction that masks whole
    responses, or the user's own, which is given the response of each token."""
    masks_responses = advantage.is_correction_enable and advantage.is_correction_type == "seq-mask-tis"
    return masks_responses or actor.built_in_loss is None or actor.built_in_loss.weighs_responses


def conflicts_of_correction(actor: Actor, advantage: Advantage) -> list[str]:
    kind, loss = advantage.is_correction_type, actor.built_in_loss
    if not advantage.is_correction_enable or kind == "seq-mask-tis" or loss is None or not loss.weighs_responses:
        return []
    line = (
        f"algo.advantage.is_correction_type {kind} weights single tokens, and actor.policy_loss_type "
        f"{actor.policy_loss_type} whole responses: use seq-mask-tis, or leave algo.advantage.is_correction_enable off"
    )
    return [line]


def conflicts_of_batch(rollout: Rollout, train: TrainRl, algo: Algo, *, rewards_vary: bool = True) -> list[str]:
    """`rewards_vary`: something but a teacher rewards the responses."""
    n, conflicts = rollout.n_samples_per_prompt, []
    estimator = algo.advantage.built_in
    if n < 2 and rewards_vary and estimator is not None and estimator.compares_group:
        conflicts.append(
            f"rollout.n_samples_per_prompt {n} leaves algo.advantage.estimator {algo.advantage.estimator} "
            "without a group to compare a response with: use 2 or more"
        )
    if n < 2 and algo.dynamic_filtering_enable and estimator is None:
        conflicts.append(
            f"rollout.n_samples_per_prompt {n} leaves algo.dynamic_filtering_enable no responses to compare: "
            "use 2 or more"
        )
    if algo.dynamic_filtering_enable and estimator is not None and not estimator.compares_group:
        conflicts.append(
            f"algo.dynamic_filtering_enable drops groups of equal rewards, and algo.advantage.estimator "
            f"{algo.advantage.estimator} learns from them, because it does not compare within groups: leave it out, or "
            f"use {', '.join(GROUP_ESTIMATORS)}"
        )
    num_responses = rollout.batch_size * n
    if num_responses % train.batch_size:
        conflicts.append(
            f"train.batch_size {train.batch_size} does not divide the {num_responses} responses of a step "
            f"(rollout.batch_size {rollout.batch_size} x rollout.n_samples_per_prompt {n}): "
            f"{_nearest_sizes(train.batch_size, rollout)}"
        )
    elif train.batch_size % n:
        conflicts.append(
            f"train.batch_size {train.batch_size} is not a multiple of rollout.n_samples_per_prompt {n}, and an "
            f"optimizer step takes whole groups: {_nearest_sizes(train.batch_size, rollout)}"
        )
    if algo.kl.init_coef > 0 and algo.kl.target is not None and num_responses >= 5 * algo.kl.horizon:
        # One step may change the coefficient by a factor of 1 - 0.2 * responses / horizon: to 0, or below.
        conflicts.append(
            f"algo.kl.horizon {algo.kl.horizon} is too short for the {num_responses} responses of a step: one step "
            f"could take algo.kl.init_coef to 0 and leave it there; give more than {num_responses // 5}"
        )
    return conflicts


def _nearest_sizes(size: int, rollout: Rollout) -> str:
    """Name the nearest valid batch sizes of an optimizer step: whole groups, and equal shares of a step's responses."""
    n = rollout.n_samples_per_prompt
    valid = [groups * n for groups in range(1, rollout.batch_size + 1) if rollout.batch_size % groups == 0]
    below = max((other for other in valid if other < size), default=None)
    above = min((other for other in valid if other > size), default=None)
    return f"use {' or '.join(str(nearest) for nearest in (below, above) if nearest is not None)}"


def steps_per_batch(rollout: Rollout, train: TrainRl) -> int:
    """Return the number of optimizer steps per batch of responses."""
    return train.max_epochs * -(-rollout.batch_size * rollout.n_samples_per_prompt // train.batch_size)


def needs_one_pass(rollout: Rollout, train: TrainRl, algo: Algo) -> bool:
    """Whether a batch of responses takes a single optimizer step by the policy that sampled it.

    Then the log-probs of the update are the old log-probs, and their own pass is saved. A reference or a teacher is
    compared with the old log-probs before the step, so with one of them two passes are needed.
    """
    responses = rollout.batch_size * rollout.n_samples_per_prompt
    compares = algo.kl.init_coef > 0 or algo.distill.teacher_model_name_or_path is not None
    return train.max_epochs == 1 and train.batch_size == responses and not compares


def _read_only_with(setting: str, values: tuple[str, ...], given: str) -> str:
    return f"it is read only with {setting} {' or '.join(values)}, not with {given}"
