"""Distillation, on the policy's own responses (`algo.distill`) or on those of a dataset (`sft`)."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.base import PositiveFloat, PositiveInt, Section, Text, Unread
from vlmrl.config.names import settings


class Distill(Section):
    """On-policy distillation: a teacher grades each token that the policy samples."""

    teacher_model_name_or_path: Text | None = None
    """Local folder or Hub id of the teacher, which adds `coef` times the difference of its log-prob and the policy's to
    the advantage of each token. It may have another size than the actor, but the same tokens and image processing.
    Without reward settings it teaches alone."""
    coef: PositiveFloat = 1.0
    """Weight of the teacher's term, beside advantages that the estimator has normalised."""
    max_gap: PositiveFloat | None = None
    """Largest difference of log-probs that enters the advantage, either way. Without it a few tokens that the teacher
    rules out, with differences of -10 and below, may decide a step."""
    num_nodes: PositiveInt = 1
    """Machines on which the teacher runs."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine. Each holds the whole teacher, or with `ds.zero_stage` 3 a part of it."""
    offload: bool = False
    """Keep the weights of the teacher in CPU memory while it is idle."""


class SftDistill(Section):
    """Off-policy distillation: the student follows the distribution of a teacher on the responses of a dataset."""

    teacher_model_name_or_path: Text | None = None
    """Local folder or Hub id of a teacher, whose distribution over the vocabulary the model learns at each token of the
    responses. It may have another size than the actor, but the same tokens and image processing. It lives in the
    actor's processes, frozen, and with `ds.zero_stage` 3 sharded."""
    distill_kl: Literal["forward", "reverse"] = "forward"
    """Divergence that is minimised: `forward`, KL(teacher || model), covers all that the teacher may say; `reverse`,
    KL(model || teacher), avoids what it would not say."""
    distill_coef: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Weight of the divergence. The rest of 1 is that of the likelihood of the responses, as without a teacher."""


def unread_of_sft_distill(distill: SftDistill) -> Unread:
    if distill.teacher_model_name_or_path is not None:
        return {}
    return dict.fromkeys(("sft.distill_kl", "sft.distill_coef"), "there is no sft.teacher_model_name_or_path")


def conflicts_of_sft_distill(teacher: str | None, *, sequence_parallel_size: int) -> list[str]:
    if teacher is None or sequence_parallel_size == 1:
        return []
    conflict = (
        f"ds.sequence_parallel_size {sequence_parallel_size} does not divide the passes of a teacher: leave it or "
        "sft.teacher_model_name_or_path out"
    )
    return [conflict]


def unread_of_distill(distill: Distill) -> Unread:
    if distill.teacher_model_name_or_path is not None:
        return {}
    reason = "there is no algo.distill.teacher_model_name_or_path"
    names = settings(Distill, "algo.distill.").keys() - {"algo.distill.teacher_model_name_or_path"}
    return dict.fromkeys((*sorted(names), "train.colocate_actor_teacher"), reason)


def conflicts_of_distill(
    *, filters: bool, rewards_vary: bool, critic_of: str | None, can_check: bool, evaluates: bool
) -> list[str]:
    """Conflicts of a run with a teacher.

    Args:
        filters: `algo.dynamic_filtering_enable` is on.
        rewards_vary: something but the teacher rewards the responses.
        critic_of: the estimator of the run's critic; None without one.
        can_check: some source scores the responses, if only with weight 0.
        evaluates: the run has held-out prompts.
    """
    conflicts = []
    if filters:
        conflicts.append(
            "algo.dynamic_filtering_enable drops groups of equal rewards, and algo.distill.teacher_model_name_or_path "
            "teaches on them too: leave one of them out"
        )
    if critic_of is not None and not rewards_vary:
        conflicts.append(
            f"algo.advantage.estimator {critic_of} has a critic, and without a reward there is nothing that it could "
            "predict: set reward.functions or another reward source, or use an estimator without a critic"
        )
    if evaluates and not can_check:
        conflicts.append(
            "the run evaluates, and nothing scores its responses: algo.distill.teacher_model_name_or_path drops the "
            "default reward.functions; with weight 0, as in reward.functions '{math: 0}', they only measure"
        )
    return conflicts
