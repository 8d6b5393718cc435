"""What the settings of the algorithm say about each other: estimator, policy loss, corrections, KL, filtering."""

from vlmrl.config.actor import Actor, Ref
from vlmrl.config.algo import Advantage, Algo
from vlmrl.config.built_in import CRITIC_ESTIMATORS, DISCOUNTING_ESTIMATORS, DUAL_CLIP_LOSSES, GROUP_ESTIMATORS
from vlmrl.config.checks import Unread
from vlmrl.config.names import settings
from vlmrl.config.rollout import Rollout
from vlmrl.config.train import TrainRl


def unread_of_loss(actor: Actor) -> Unread:
    found: Unread = {}
    if actor.eps_clip_low_high is not None:
        found["actor.eps_clip"] = "actor.eps_clip_low_high is given and takes its place"
    elif actor.paper_clip is not None:
        found["actor.eps_clip"] = (
            f"actor.policy_loss_type {actor.policy_loss_type} clips in its paper's range unless one is given"
        )
    if actor.policy_loss_type not in DUAL_CLIP_LOSSES:
        found["actor.dual_clip"] = _read_by_alone("actor.policy_loss_type", DUAL_CLIP_LOSSES, actor.policy_loss_type)
    return found


def unread_of_advantage(advantage: Advantage) -> Unread:
    found: Unread = {}
    setting, estimator = "algo.advantage.estimator", advantage.estimator
    if estimator not in CRITIC_ESTIMATORS:
        found["algo.advantage.lambd"] = _read_by_alone(setting, CRITIC_ESTIMATORS, estimator)
    if estimator not in DISCOUNTING_ESTIMATORS:
        reason = _read_by_alone(setting, DISCOUNTING_ESTIMATORS, estimator)
        found |= {"algo.advantage.gamma": reason, "algo.advantage.no_std_norm": reason}
    if not advantage.is_correction_enable:
        names = ("algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold")
        found |= dict.fromkeys(names, "algo.advantage.is_correction_enable is off")
    return found


def unread_of_kl(algo: Algo) -> Unread:
    if algo.kl.init_coef == 0:
        reason = "algo.kl.init_coef is 0, so there is no reference model"
        names = (f"algo.kl.{name}" for name in ("estimator", "use_loss", "target", "horizon"))
        return dict.fromkeys((*settings(Ref, "ref."), *names, "train.colocate_actor_ref"), reason)
    if algo.kl.target is None:
        return {"algo.kl.horizon": "algo.kl.init_coef stays as it is without algo.kl.target"}
    return {}


def unread_of_filtering(algo: Algo) -> Unread:
    if algo.dynamic_filtering_enable:
        return {}
    names = ("algo.dynamic_filtering_range", "algo.dynamic_filtering_max_draws")
    return dict.fromkeys(names, "algo.dynamic_filtering_enable is off")


def unread_of_updates(rollout: Rollout, train: TrainRl) -> Unread:
    """Settings that act between the optimizer steps of one batch of answers."""
    if steps_per_batch(rollout, train) > 1:
        return {}
    reason = "one optimizer step per batch of answers leaves no rest of an update: lower train.batch_size"
    return {"algo.kl.early_stop": reason}


def conflicts_of_correction(actor: Actor, advantage: Advantage) -> list[str]:
    kind, loss = advantage.is_correction_type, actor.built_in_loss
    if not advantage.is_correction_enable or kind == "seq-mask-tis" or loss is None or not loss.weighs_responses:
        return []
    line = (
        f"algo.advantage.is_correction_type {kind} weighs single tokens, and actor.policy_loss_type "
        f"{actor.policy_loss_type} whole responses: use seq-mask-tis, or leave algo.advantage.is_correction_enable off"
    )
    return [line]


def conflicts_of_batch(rollout: Rollout, train: TrainRl, algo: Algo) -> list[str]:
    n, found = rollout.n_samples_per_prompt, []
    estimator = algo.advantage.built_in
    if n < 2 and estimator is not None and estimator.compares_group:
        found.append(
            f"rollout.n_samples_per_prompt {n} leaves algo.advantage.estimator {algo.advantage.estimator} "
            "without a group to compare a response with: use 2 or more"
        )
    if n < 2 and algo.dynamic_filtering_enable and estimator is None:
        found.append(
            f"rollout.n_samples_per_prompt {n} leaves algo.dynamic_filtering_enable one response to judge a prompt by: "
            "use 2 or more"
        )
    if algo.dynamic_filtering_enable and estimator is not None and not estimator.compares_group:
        found.append(
            f"algo.dynamic_filtering_enable drops groups without a difference, and algo.advantage.estimator "
            f"{algo.advantage.estimator} does not compare within groups, so that they would teach: leave it out, or "
            f"use {', '.join(GROUP_ESTIMATORS)}"
        )
    num_answers = rollout.batch_size * n
    if num_answers % train.batch_size:
        found.append(
            f"train.batch_size {train.batch_size} does not divide the {num_answers} responses of a step "
            f"(rollout.batch_size {rollout.batch_size} x rollout.n_samples_per_prompt {n}): "
            f"{_nearest_sizes(train.batch_size, rollout)}"
        )
    elif train.batch_size % n:
        found.append(
            f"train.batch_size {train.batch_size} is not a multiple of rollout.n_samples_per_prompt {n}, and an "
            f"optimizer step takes whole groups: {_nearest_sizes(train.batch_size, rollout)}"
        )
    if algo.kl.init_coef > 0 and algo.kl.target is not None and num_answers >= 5 * algo.kl.horizon:
        # One step could take the coefficient by 0.2 * answers / horizon: to nothing, or below.
        found.append(
            f"algo.kl.horizon {algo.kl.horizon} is too short for the {num_answers} answers of a step: one step could "
            f"take algo.kl.init_coef to 0 and leave it there; give more than {num_answers // 5}"
        )
    return found


def _nearest_sizes(size: int, rollout: Rollout) -> str:
    """Which batch sizes of an optimizer step do: whole groups, and equal shares of a step's responses."""
    n = rollout.n_samples_per_prompt
    good = [groups * n for groups in range(1, rollout.batch_size + 1) if rollout.batch_size % groups == 0]
    below = max((one for one in good if one < size), default=None)
    above = min((one for one in good if one > size), default=None)
    near = " or ".join(str(one) for one in (below, above) if one is not None)
    return f"the nearest that {'do are' if ' or ' in near else 'does is'} {near}"


def steps_per_batch(rollout: Rollout, train: TrainRl) -> int:
    """Optimizer steps that a batch of answers is learned from."""
    return train.max_epochs * -(-rollout.batch_size * rollout.n_samples_per_prompt // train.batch_size)


def _read_by_alone(setting: str, values: tuple[str, ...], given: str) -> str:
    verb = "read" if len(values) > 1 else "reads"
    return f"{setting} {', '.join(values)} alone {verb} it, and here it is {given}"
