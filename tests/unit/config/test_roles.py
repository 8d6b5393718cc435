"""Errors about critic, reward models, moving average and devices, as a user sees them."""

from typing import Any

import pytest

from vlmrl.config.actor import Model
from vlmrl.config.bench_verbs import StepBench
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
GAE = "--algo.advantage.estimator gae"
SCORER = "--reward.model_name_or_path scorer"


def rl(line: str = "") -> RlConfig:
    return load(RlConfig, [*NEEDED, *line.split()])


ASYNC = "--train.async_enable --algo.advantage.is_correction_enable"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{ASYNC} --train.colocate_all", "train.colocate_all places both on the same devices"),
        ("--train.async_enable", r"2 of 128 .* 98 with it.*: set algo.advantage.is_correction_enable"),
        (f"{ASYNC} --train.async_queue_size -1", "greater than or equal to 0"),
        (f"{GAE} --critic.freezing_steps 5 --train.max_steps 5", "leaves the actor none of train.max_steps 5"),
        (f"{GAE} --critic.freezing_steps 0", "above 0, or -1 for never"),
        (f"{GAE} --critic.value_clip 0", "greater than 0"),
        (f"{GAE} --ds.adam_offload --critic.zero_stage 0", "set critic.zero_stage to 1, 2 or 3"),
        (f"{GAE} --ds.adam_offload --critic.optim muon", "critic.optim muon has its own"),
        (
            f"{GAE} --ds.lora.rank 8 --ds.load_in_4bit --ds.quant_storage uint8 --critic.zero_stage 3",
            "ds.quant_storage uint8 cannot be sharded by critic.zero_stage 3",
        ),
        ("--ds.adam_offload --actor.optim muon", "actor.optim muon has its own"),
        (
            f"{GAE} --ds.lora.rank 8 --ds.lora.target_modules vision --critic.freeze_projector",
            "would change what critic.freeze_projector freezes",
        ),
        (
            f"{GAE} --critic.optim muon --critic.muon.ns_steps 6",
            "five Newton-Schulz steps with Nesterov momentum",
        ),
        (
            "--actor.optim muon --actor.muon.nesterov false",
            "five Newton-Schulz steps with Nesterov momentum",
        ),
        ("--actor.optim muon --actor.muon.momentum 1", "less than 1"),
        ("--train.enable_ema --train.ema_beta 1", "less than 1"),
        ("--train.enable_ema --train.ema_beta 0", "greater than 0"),
        (
            "--eval.dataset d --eval.temperature 0 --eval.n_samples_per_prompt 4",
            "eval.temperature 0 gives the same response 4 times",
        ),
        (
            f"{SCORER} --reward.remote_url mine.py:model",
            "your function is called model, like the metric of the reward model",
        ),
        ("--eval.dataset d --ckpt.best_metric_key eval/d/pass@1", "makes none during training: set eval.steps"),
        ("--data.eval_fraction 0.1 --ckpt.best_metric_key eval/d/pass@1", "makes none during training"),
        (
            "--data.eval_fraction 0.1 --eval.temperature 0 --eval.n_samples_per_prompt 4",
            "eval.temperature 0 gives the same response 4 times",
        ),
        ("--data.eval_fraction 1.0", "data.eval_fraction 1.0: .*less than 1"),
    ],
)
def test_invalid_combinations_are_one_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        rl(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "name", "reason"),
    [
        ("--train.async_queue_size 2", "train.async_queue_size", "train.async_enable is off"),
        ("--train.partial_rollout_enable", "train.partial_rollout_enable", "train.async_enable is off"),
        ("--critic.adam.lr 1e-5", "critic.adam.lr", "algo.advantage.estimator group_norm has no critic, gae has"),
        ("--critic.num_gpus_per_node 2", "critic.num_gpus_per_node", "has no critic"),
        ("--train.colocate_actor_critic", "train.colocate_actor_critic", "has no critic"),
        (f"--train.colocate_critic_reward {SCORER}", "train.colocate_critic_reward", "has no critic"),
        (
            "--algo.advantage.estimator mine.py:own --critic.value_clip 1",
            "critic.value_clip",
            "has no critic, unless critic.model_name_or_path gives its initial model",
        ),
        (f"{GAE} --train.colocate_critic_reward", "train.colocate_critic_reward", "there is no reward model"),
        (
            f"{GAE} --train.colocate_actor_critic --critic.num_gpus_per_node 2",
            "critic.num_gpus_per_node",
            "lives in the actor's processes",
        ),
        (f"{GAE} --train.colocate_all --critic.num_nodes 2", "critic.num_nodes", "lives in the actor's processes"),
        (
            f"{GAE} --train.colocate_all --train.colocate_actor_critic",
            "train.colocate_actor_critic",
            "train.colocate_all includes it",
        ),
        (
            f"{GAE} {SCORER} --train.colocate_all --train.colocate_critic_reward",
            "train.colocate_critic_reward",
            "train.colocate_all includes it",
        ),
        (f"{GAE} --critic.muon.lr 0.1", "critic.muon.lr", "critic.optim is adam"),
        ("--actor.muon.lr 0.1", "actor.muon.lr", "actor.optim is adam"),
        (
            f"{GAE} --critic.lr_scheduler linear --critic.min_lr_ratio 0.2",
            "critic.min_lr_ratio",
            "only critic.lr_scheduler cosine_with_min_lr has a floor",
        ),
        (
            f"{GAE} --critic.lr_scheduler constant --critic.lr_warmup_ratio 0.2",
            "critic.lr_warmup_ratio",
            "does not warm up",
        ),
        ("--train.ema_beta 0.9", "train.ema_beta", "train.enable_ema is off"),
        ("--ckpt.best_metric_key a", "ckpt.best_metric_key", "nothing is evaluated without eval.dataset"),
        ("--data.eval_fraction 0.1 --eval.split dev", "eval.split", "holds rows of data.prompt_split out"),
    ],
)
def test_a_setting_that_would_not_be_read_is_refused(line: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rl(line)
    assert str(caught.value).startswith(f"{name} would not be read: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        f"{GAE} --critic.freezing_steps 5 --train.max_steps 6 --critic.value_clip none",
        f"{GAE} --critic.optim muon --critic.muon.lr 0.1",
        "--algo.advantage.estimator mine.py:own --critic.model_name_or_path m --critic.value_clip 1",
        f"{GAE} {SCORER} --train.colocate_critic_reward --critic.num_gpus_per_node 2 --reward.num_gpus_per_node 2",
        f"{GAE} {SCORER} --train.colocate_critic_reward --train.colocate_actor_critic",
        "--train.enable_ema --train.ema_beta 0.9",
        "--eval.dataset d --eval.steps 5 --ckpt.best_metric_key eval/d/pass@1 --eval.breakdown_key none",
        "--data.eval_fraction 0.1 --eval.steps 5 --ckpt.best_metric_key eval/d/pass@1",
        # The critic's tower is frozen, so its image features are cached.
        f"{GAE} --critic.freeze_visual_encoder --critic.freeze_projector --vision.cache_gib 1",
        f"{SCORER} --vision.cache_gib 1",
    ],
)
def test_valid_combinations_are_accepted(line: str) -> None:
    rl(line)


def test_without_gae_there_is_no_critic() -> None:
    assert not rl().has_critic
    assert rl(GAE).has_critic


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (GAE, "m"),
        (f"{GAE} {SCORER}", "scorer"),
        (f"{GAE} --reward.process_model_name_or_path steps", "m"),
        (f"{GAE} {SCORER} --critic.model_name_or_path other", "other"),
    ],
)
def test_the_critic_is_initialised_from_its_path_the_reward_model_or_the_actor(line: str, path: str) -> None:
    assert rl(line).resolved_critic.model_name_or_path == path


def test_unset_settings_of_the_critic_are_the_actors() -> None:
    actor = "--actor.freeze_visual_encoder --actor.gradient_checkpointing_enable --ds.zero_stage 1"
    whole = rl(f"{GAE} {actor} --critic.freeze_projector --critic.num_gpus_per_node 4").resolved_critic
    assert (whole.freeze_visual_encoder, whole.freeze_projector, whole.gradient_checkpointing_enable) == (True,) * 3
    assert (whole.zero_stage, whole.num_gpus_per_node) == (1, 4)
    critic = rl(f"{GAE} {actor} --critic.freeze_visual_encoder false --critic.zero_stage 3").resolved_critic
    assert (critic.freeze_visual_encoder, critic.zero_stage) == (False, 3)


def test_a_critic_in_the_actors_processes_has_the_same_ranks() -> None:
    ranks = "--actor.num_nodes 2 --actor.num_gpus_per_node 4"
    for options in ("--train.colocate_actor_critic", "--train.colocate_all --vllm.sync_backend ipc"):
        config = rl(f"{GAE} {ranks} {options}")
        assert config.critic_is_with_actor
        assert (config.resolved_critic.num_nodes, config.resolved_critic.num_gpus_per_node) == (2, 4)
    apart = rl(f"{GAE} {ranks}")
    assert not apart.critic_is_with_actor
    assert (apart.resolved_critic.num_nodes, apart.resolved_critic.num_gpus_per_node) == (1, 1)
    assert not rl(f"{ranks} --train.colocate_all").critic_is_with_actor


def test_the_critic_has_the_settings_of_a_model() -> None:
    model = rl(
        f"{GAE} --critic.adam.weight_decay 0.1 --critic.lr_scheduler linear --actor.adam.lr 1e-3"
    ).resolved_critic
    result = model.as_model
    assert isinstance(result, Model)
    assert (result.adam.lr, result.adam.weight_decay, result.lr_scheduler) == (9e-6, 0.1, "linear")
    assert (result.model_name_or_path, result.adapter_name_or_path) == ("m", None)


ALL = {"actor", "ref", "teacher", "vllm", "reward_model", "process_model"}
MODELS = {"reward_model", "process_model"}
REF = "--algo.kl.init_coef 0.1"


@pytest.mark.parametrize(
    ("line", "pools"),
    [
        ("", [{"actor"}, MODELS]),
        (f"{GAE} {SCORER} --train.colocate_all", [ALL]),
        (f"{REF} --train.colocate_actor_ref", [{"actor", "ref"}, MODELS]),
        (f"{GAE} {SCORER} --train.colocate_critic_reward", [{"actor"}, MODELS | {"critic"}]),
        (
            f"{GAE} {SCORER} {REF} --train.colocate_critic_reward --train.colocate_actor_ref",
            [{"actor", "ref"}, MODELS | {"critic"}],
        ),
        (f"{GAE} --train.colocate_actor_critic", [{"actor"}, MODELS]),
        (f"{GAE} {SCORER} --train.colocate_actor_critic --train.colocate_critic_reward", [{"actor"} | MODELS]),
    ],
)
def test_pools_of_roles_that_share_devices(line: str, pools: list[Any]) -> None:
    assert rl(line).pools == pools


def test_bench_step_reads_muon_only_with_the_muon_optimizer() -> None:
    model = ["--actor.model_name_or_path", "m", "--actor.muon.lr", "0.1"]
    assert load(StepBench, [*model, "--actor.optim", "muon"]).actor.muon.lr == 0.1
    with pytest.raises(ConfigError, match=r"actor\.muon\.lr would not be read: actor\.optim is adam"):
        load(StepBench, model)


def test_supervised_training_keeps_its_best_model_by_an_evaluation_and_may_stop_by_it() -> None:
    best = [*NEEDED, "--ckpt.best_metric_key", "eval/toy/loss"]
    with pytest.raises(ConfigError, match="nothing is evaluated without"):
        load(SftConfig, best)
    with pytest.raises(ConfigError, match="-1 makes none during training"):
        load(SftConfig, [*best, "--eval.dataset", "toy"])
    stopping = ["--eval.dataset", "toy", "--eval.steps", "5", "--eval.early_stop_patience", "3"]
    assert load(SftConfig, [*best, *stopping]).eval.early_stop_patience == 3
    with pytest.raises(ConfigError, match="does not name the metric"):
        load(SftConfig, [*NEEDED, *stopping])


def test_an_asynchronous_run_of_no_batches_ahead_is_synchronous() -> None:
    assert rl("--train.async_enable --train.async_queue_size 0 --train.colocate_all").train.queue_size == 0
    assert rl(ASYNC).train.queue_size == 1
    assert rl().train.queue_size == 0


@pytest.mark.parametrize("section", ["vllm", "ds"])
def test_an_asynchronous_run_does_not_sleep(section: str) -> None:
    with pytest.raises(ConfigError, match=f"{section}.enable_sleep frees the memory of one of them meanwhile"):
        rl(f"{ASYNC} --{section}.enable_sleep")
