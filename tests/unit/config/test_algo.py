"""Errors about estimators, losses, corrections, KL and filtering, as a user sees them."""

import pytest

from vlmrl.config.built_in import ESTIMATORS, GROUP_ESTIMATORS, POLICY_LOSSES
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
ONE = "--rollout.batch_size 8 --rollout.n_samples_per_prompt 1 --train.batch_size 8"
GAE, REINFORCE = "--algo.advantage.estimator gae", "--algo.advantage.estimator reinforce"
KL = "--algo.kl.init_coef 0.1"
CORRECTED = "--algo.advantage.is_correction_enable"


def rl(line: str = "") -> RlConfig:
    return load(RlConfig, [*NEEDED, *line.split()])


def refused(line: str) -> str:
    """The one-line error that a user sees."""
    with pytest.raises(ConfigError) as caught:
        rl(line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "mine.py:baseline", "a/b c/mine.py:baseline"])
def test_every_estimator_and_a_users_are_accepted(estimator: str) -> None:
    assert load(RlConfig, [*NEEDED, "--algo.advantage.estimator", estimator]).algo.advantage.estimator == estimator


@pytest.mark.parametrize("loss", [*POLICY_LOSSES, "mine.py:loss"])
def test_every_loss_and_a_users_are_accepted(loss: str) -> None:
    assert rl(f"--actor.policy_loss_type {loss}").actor.policy_loss_type == loss


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--algo.advantage.estimator grpo", "no estimator is called 'grpo': there are gae, reinforce, "),
        ("--algo.advantage.estimator mine.py", "and path/to/file.py:function"),
        ("--actor.policy_loss_type pg", "no policy loss is called 'pg': there are ppo, gspo, cispo, and path"),
        ("--actor.dual_clip 1.0", "--actor.dual_clip 1.0: should be greater than 1"),
        ("--actor.eps_clip -0.1", "--actor.eps_clip -0.1: should be greater than or equal to 0"),
        ("--actor.entropy_coef -1", "greater than or equal to 0"),
        ("--algo.advantage.gamma 1.1", "less than or equal to 1"),
        (f"{GAE} --algo.advantage.lambd 2", "less than or equal to 1"),
        # k1 has no useful gradient.
        (f"{KL} --algo.kl.use_loss", "algo.kl.estimator k1 has no useful gradient in the loss: use k2 or k3"),
        (f"{KL} --algo.kl.target 0", "greater than 0"),
        (f"{KL} --algo.kl.target 0.1 --algo.kl.horizon 0", "greater than 0"),
        # 128 prompts with 8 responses each: the coefficient's factor could be 1 - 0.2 * 1024 / 204, below 0.
        (
            f"{KL} --algo.kl.target 0.1 --algo.kl.horizon 204",
            "algo.kl.horizon 204 is too short for the 1024 responses of a step",
        ),
        ("--algo.kl.early_stop 0", "greater than 0"),
        # Routing replay.
        ("--algo.routing_replay --vllm.enable_prefix_caching false", "experts only with vllm.enable_prefix_caching"),
        (f"--algo.routing_replay --train.async_enable {CORRECTED}", "is not built yet for responses across weight"),
        (
            "--algo.routing_replay --train.agent_func_path a.py",
            "algo.routing_replay is not built yet for conversations",
        ),
        # Corrections.
        (
            f"{CORRECTED} --algo.advantage.is_correction_threshold 5 0.5",
            "algo.advantage.is_correction_threshold 5 0.5 is empty: give the smaller bound first",
        ),
        (f"{CORRECTED} --algo.advantage.is_correction_threshold 2 2", "is empty"),
        (f"{CORRECTED} --algo.advantage.is_correction_threshold -1 2", "greater than or equal to 0"),
        (f"{CORRECTED} --algo.advantage.is_correction_type mis", "should be 'tis', 'icepop' or 'seq-mask-tis'"),
        (
            f"{CORRECTED} --algo.advantage.is_correction_type icepop --actor.policy_loss_type gspo",
            "icepop weights single tokens, and actor.policy_loss_type gspo whole responses: use seq-mask-tis",
        ),
        (f"{CORRECTED} --actor.policy_loss_type gspo", "is_correction_type tis weights single tokens"),
        # Groups of one.
        ("--rollout.n_samples_per_prompt 1", "algo.advantage.estimator group_norm without a group"),
        *(
            (f"{ONE} --algo.advantage.estimator {name}", f"estimator {name} without a group .*: use 2 or more")
            for name in GROUP_ESTIMATORS
        ),
        (
            f"{ONE} --algo.advantage.estimator mine.py:f --algo.dynamic_filtering_enable",
            "no responses to compare: use 2 or more",
        ),
        # Filtering by differences that the estimator does not use.
        *(
            (
                f"--algo.advantage.estimator {name} --algo.dynamic_filtering_enable",
                f"algo.dynamic_filtering_enable drops groups .*estimator {name} learns from them",
            )
            for name in ("gae", "reinforce")
        ),
        # Empty ranges.
        (
            "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 1 0",
            "algo.dynamic_filtering_range 1 0 keeps no group: give the smaller bound first",
        ),
        ("--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.5 0.5", "keeps no group"),
        ("--algo.dynamic_filtering_enable --algo.dynamic_filtering_max_draws 0", "greater than 0"),
    ],
)
def test_invalid_combinations_are_one_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl(line)
    assert refused(line)


@pytest.mark.parametrize(
    ("line", "name", "reason"),
    [
        (
            "--algo.advantage.lambd 0.9",
            "algo.advantage.lambd",
            "it is read only with algo.advantage.estimator gae, not with",
        ),
        (f"{REINFORCE} --algo.advantage.lambd 0.9", "algo.advantage.lambd", "not with reinforce"),
        (
            "--algo.advantage.gamma 0.9",
            "algo.advantage.gamma",
            "it is read only with algo.advantage.estimator gae or reinforce or reinforce_baseline, not with group_norm",
        ),
        ("--algo.advantage.estimator rloo --algo.advantage.no_std_norm", "algo.advantage.no_std_norm", "not with rloo"),
        ("--algo.advantage.estimator a.py:f --algo.advantage.gamma 0.9", "algo.advantage.gamma", "not with a.py:f"),
        (
            "--algo.advantage.is_correction_type icepop",
            "algo.advantage.is_correction_type",
            "algo.advantage.is_correction_enable is off",
        ),
        (
            "--algo.advantage.is_correction_threshold 0.5 2",
            "algo.advantage.is_correction_threshold",
            "algo.advantage.is_correction_enable is off",
        ),
        ("--actor.dual_clip 3 --actor.policy_loss_type gspo", "actor.dual_clip", "ppo, not with gspo"),
        ("--actor.dual_clip 3 --actor.policy_loss_type cispo", "actor.dual_clip", "not with cispo"),
        ("--actor.dual_clip 3 --actor.policy_loss_type a.py:f", "actor.dual_clip", "not with a.py:f"),
        ("--algo.kl.target 0.1", "algo.kl.target", "algo.kl.init_coef is 0"),
        ("--algo.kl.horizon 100", "algo.kl.horizon", "algo.kl.init_coef is 0"),
        (f"{KL} --algo.kl.horizon 100", "algo.kl.horizon", "is constant without algo.kl.target"),
        ("--algo.dynamic_filtering_range 0 1", "algo.dynamic_filtering_range", "dynamic_filtering_enable is off"),
        ("--algo.dynamic_filtering_max_draws 3", "algo.dynamic_filtering_max_draws", "dynamic_filtering_enable is off"),
        (
            f"{ONE} {REINFORCE} --algo.kl.early_stop 0.1",
            "algo.kl.early_stop",
            "with one optimizer step per batch of responses there is nothing to skip: lower train.batch_size",
        ),
    ],
)
def test_a_setting_that_would_not_be_read_is_refused(line: str, name: str, reason: str) -> None:
    message = refused(line)
    assert message.startswith(f"{name} would not be read: ")
    assert reason in message


@pytest.mark.parametrize(
    "line",
    [
        f"{GAE} {ONE} --algo.advantage.lambd 0.95 --algo.advantage.gamma 0.99 --algo.advantage.no_std_norm",
        f"{REINFORCE} {ONE} --algo.advantage.gamma 0.99 {KL}",
        "--algo.advantage.estimator reinforce_baseline --algo.advantage.no_std_norm",
        f"--algo.advantage.estimator mine.py:f {ONE}",
        f"{KL} --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.target 0.05 --algo.kl.horizon 1000",
        "--algo.kl.early_stop 0.1",
        f"{ONE} {REINFORCE} --train.max_epochs 2 --algo.kl.early_stop 0.1",
        f"{CORRECTED} --algo.advantage.is_correction_type icepop --algo.advantage.is_correction_threshold 0.5 2",
        f"{CORRECTED} --algo.advantage.is_correction_type seq-mask-tis --actor.policy_loss_type gspo",
        f"{CORRECTED} --actor.policy_loss_type cispo",
        f"{CORRECTED} --actor.policy_loss_type mine.py:loss --actor.eps_clip 0.3",
        "--actor.dual_clip 3 --actor.eps_clip_low_high 0.2 0.28 --actor.entropy_coef 0.001",
        "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.1 0.9 --algo.dynamic_filtering_max_draws 3",
    ],
)
def test_valid_combinations_are_accepted(line: str) -> None:
    rl(line)


@pytest.mark.parametrize(
    ("line", "clip"),
    [
        ("", (0.2, 0.2)),
        ("--actor.eps_clip 0.3", (0.3, 0.3)),
        ("--actor.eps_clip_low_high 0.2 0.28", (0.2, 0.28)),
        ("--actor.policy_loss_type gspo", (3e-4, 4e-4)),
        # A given value is used even if it is the default of the other losses.
        ("--actor.policy_loss_type gspo --actor.eps_clip 0.2", (0.2, 0.2)),
        ("--actor.policy_loss_type gspo --actor.eps_clip_low_high 0.001 0.002", (0.001, 0.002)),
        ("--actor.policy_loss_type cispo", (0.2, 0.2)),
    ],
)
def test_gspo_has_its_papers_clip_range_unless_one_is_given(line: str, clip: tuple[float, float]) -> None:
    assert rl(line).actor.clip_range == clip


@pytest.mark.parametrize(
    ("line", "aggregation"),
    [
        ("", "token"),
        (GAE, "token"),
        ("--algo.advantage.estimator dr_grpo", "constant"),
        ("--algo.advantage.estimator dr_grpo --algo.loss_agg token", "token"),
        ("--actor.policy_loss_type gspo", "sequence"),
        ("--actor.policy_loss_type gspo --algo.advantage.estimator dr_grpo", "sequence"),
        ("--actor.policy_loss_type gspo --algo.loss_agg token", "token"),
        ("--actor.policy_loss_type cispo", "token"),
    ],
)
def test_the_default_aggregation_is_the_papers(line: str, aggregation: str) -> None:
    assert rl(line).aggregation == aggregation
