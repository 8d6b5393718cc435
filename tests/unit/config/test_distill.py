"""Errors about distillation, as a user sees them."""

import pytest

from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
TEACHER = "--algo.distill.teacher_model_name_or_path t"
MATH = ["--reward.functions", "{math: 0}"]


def rl(line: str = "", *more: str) -> RlConfig:
    return load(RlConfig, [*NEEDED, *line.split(), *more])


def refused(line: str, *more: str) -> str:
    """The one-line error that a user sees."""
    (error,) = errors(line, *more)
    return error


def errors(line: str, *more: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        rl(line, *more)
    return str(caught.value).splitlines()


def test_a_teacher_alone_needs_no_reward_and_no_groups() -> None:
    assert rl().reward.functions == {"math": 1.0}
    alone = rl(f"{TEACHER} --rollout.n_samples_per_prompt 1 --rollout.batch_size 128 --train.batch_size 128")
    assert alone.has_teacher
    assert alone.reward.functions == {}
    assert (alone.rewards_vary, alone.scores_responses) == (False, False)
    assert not alone.needs_one_pass, "the teacher is compared with the log-probs before the update"
    assert rl("--rollout.batch_size 16").needs_one_pass


def test_a_teacher_may_be_beside_rewards() -> None:
    assert rl(f"{TEACHER} --reward.functions math").rewards_vary
    assert rl(f"{TEACHER} --reward.model_name_or_path rm").rewards_vary
    assert rl(f"{TEACHER} --reward.remote_url mine.py:score").rewards_vary
    assert rl(f"{TEACHER} --reward.overlong_buffer_len 16").rewards_vary
    measured = rl(f"{TEACHER} --eval.dataset e", *MATH)
    assert (measured.rewards_vary, measured.scores_responses) == (False, True)
    for reward in ("--reward.functions math", "--algo.kl.init_coef 0.1"):
        one = "--rollout.n_samples_per_prompt 1 --rollout.batch_size 128"
        assert "without a group to compare" in refused(f"{TEACHER} {reward} {one}")
    in_loss = "--algo.kl.init_coef 0.1 --algo.kl.use_loss --algo.kl.estimator k3"
    assert not rl(f"{TEACHER} {in_loss} {one}").rewards_vary


@pytest.mark.parametrize(
    ("line", "unread"),
    [
        ("--algo.advantage.estimator rloo", "algo.advantage.estimator"),
        ("--algo.advantage.estimator group_norm", "algo.advantage.estimator"),
        ("--algo.advantage.estimator dr_grpo --algo.loss_agg token", "algo.advantage.estimator"),
        ("--algo.advantage.estimator dr_grpo --actor.policy_loss_type gspo", "algo.advantage.estimator"),
        (
            "--algo.loss_agg token --algo.advantage.estimator reinforce --algo.advantage.gamma 0.9",
            "algo.advantage.gamma",
        ),
        ("--algo.advantage.estimator reinforce --algo.advantage.no_std_norm", "algo.advantage.no_std_norm"),
        ("--reward.max_failed_fraction 0.5", "reward.max_failed_fraction"),
        ("--reward.time_limit_s 5", "reward.time_limit_s"),
    ],
)
def test_settings_that_only_rewards_give_a_meaning_are_refused_with_a_teacher_alone(line: str, unread: str) -> None:
    in_loss = "--algo.kl.init_coef 0.1 --algo.kl.use_loss --algo.kl.estimator k3"
    for alone in (TEACHER, f"{TEACHER} {in_loss}"):
        assert any(f"{unread} would not be read: no" in error for error in errors(f"{alone} {line}"))
    rl(f"{TEACHER} --reward.functions math {line}")
    if "algo.advantage" in line:
        message = f"{unread} would not be read: nothing but algo.distill."
        assert any(message in error for error in errors(f"{TEACHER} {line}", *MATH))
        rl(f"{TEACHER} --algo.kl.init_coef 0.1 {line}")


def test_estimators_that_are_read_without_rewards_are_not_refused() -> None:
    assert rl(f"{TEACHER} --algo.advantage.estimator dr_grpo").aggregation == "constant"
    rl(f"{TEACHER} --algo.advantage.estimator mine.py:lengths")


def test_scores_that_are_only_measured_are_not_clipped() -> None:
    line = "--reward.clip_range 0 1"
    assert "reward.clip_range would not be read: all reward sources have weight 0" in refused(
        f"{TEACHER} {line}", *MATH
    )
    rl(f"{TEACHER} {line} --reward.stop_properly_penalty_coef 0", *MATH)
    rl(f"{TEACHER} {line} --reward.functions math")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--algo.distill.coef 2", "algo.distill.coef would not be read: there is no algo.distill.teacher_model"),
        ("--algo.distill.offload", "algo.distill.offload would not be read"),
        ("--algo.distill.num_gpus_per_node 2", "algo.distill.num_gpus_per_node would not be read"),
        ("--train.colocate_actor_teacher", "train.colocate_actor_teacher would not be read"),
        (f"{TEACHER} --algo.distill.coef 0", "should be greater than 0"),
        (
            f"{TEACHER} --reward.functions math --algo.dynamic_filtering_enable",
            "drops groups of equal rewards, and algo.distill.teacher_model_name_or_path teaches on them too",
        ),
        (
            f"{TEACHER} --algo.advantage.estimator gae",
            "algo.advantage.estimator gae has a critic, and without a reward there is nothing",
        ),
        (f"{TEACHER} --data.eval_fraction 0.1", "the run evaluates, and nothing scores its responses"),
        (f"{TEACHER} --reward.clip_range 0 1", "reward.clip_range would not be read: there is no reward, only"),
        (f"{TEACHER} --train.colocate_all --train.colocate_actor_teacher", "train.colocate_all includes it"),
    ],
)
def test_settings_that_contradict_a_teacher_are_refused(line: str, message: str) -> None:
    assert message in refused(line)


def test_a_critic_may_learn_from_rewards_or_a_kl_penalty_beside_the_teacher() -> None:
    gae = f"{TEACHER} --algo.advantage.estimator gae"
    assert rl(f"{gae} --reward.functions math").has_critic
    assert rl(f"{gae} --algo.kl.init_coef 0.1").has_critic
    assert "gae has a critic" in refused(gae, *MATH)


def test_the_teacher_shares_devices_where_the_user_says_so() -> None:
    assert "teacher" not in frozenset().union(*rl(TEACHER).pools)
    assert rl(f"{TEACHER} --train.colocate_actor_teacher").pools[0] == {"actor", "teacher"}
    assert {"actor", "teacher", "vllm"} <= rl(f"{TEACHER} --train.colocate_all").pools[0]


def test_supervised_training_reads_the_settings_of_a_teacher_only_with_one() -> None:
    taught = load(SftConfig, [*NEEDED, *["--sft.teacher_model_name_or_path", "t", "--sft.distill_kl", "reverse"]])
    assert (taught.sft.distill_kl, taught.sft.distill_coef, taught.has_other_frozen_tower) == ("reverse", 0.5, True)
    for line, message in (
        ("--sft.distill_kl reverse", "sft.distill_kl would not be read: there is no sft.teacher_model_name_or_path"),
        ("--sft.distill_coef 0.1", "sft.distill_coef would not be read"),
        ("--sft.teacher_model_name_or_path t --sft.distill_coef 1.5", "less than or equal to 1"),
        ("--sft.teacher_model_name_or_path t --sft.distill_coef 0", "greater than 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(SftConfig, [*NEEDED, *line.split()])
        assert message in str(caught.value)
