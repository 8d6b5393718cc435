"""Settings of roles, from the configuration of a run."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_loop import config

from vlmrl.algorithms.corrections import Correction, correct
from vlmrl.cluster.role_settings import (
    absolute,
    critic_settings,
    demand,
    engine_settings,
    generation_limit_s,
    policy_loss,
    policy_settings,
    reference_settings,
    reward_model_settings,
    rewarder_settings,
)
from vlmrl.config.num_steps import fraction_done, last_step, last_step_from, optimizer_steps
from vlmrl.config.stages import SftConfig
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan

AGENT = {
    "train": {"batch_size": 8, "agent_func_path": "my_env.py:make"},
    "data": {"prompt_dataset": "toy", "max_len": 128},
    "rollout": {"batch_size": 2, "n_samples_per_prompt": 4},
    "vllm": {"generate_timeout_s": 1000.0},
}
"""A run with an environment."""
GAE = {"advantage": {"estimator": "gae"}}


def loss(**changes: Any) -> Any:
    return policy_loss(config(**changes))


def actor(**changes: Any) -> dict[str, Any]:
    return {"model_name_or_path": "model"} | changes


@pytest.mark.parametrize(("num_workers", "rounds"), [(None, 1), (4, 1), (3, 2), (1, 4)])
def test_engines_have_time_for_all_attempts_of_episodes_that_wait_for_each_other(
    num_workers: int | None, rounds: int
) -> None:
    limits = {"episode_limit_s": 100.0, "step_limit_s": 10.0, "max_retries": 1, "num_workers": num_workers}
    attempt_s = 120 + 100 + 10 + 6  # start, calls, the last of which may run over, and close
    assert generation_limit_s(config(**AGENT, agent=limits)) == rounds * (1000 + 2 * attempt_s)
    assert generation_limit_s(config(vllm={"generate_timeout_s": 1000.0})) == 1000


def test_all_knobs_of_the_loss_come_from_their_settings() -> None:
    plain = loss()
    assert (plain.kind, plain.clip_low, plain.clip_high, plain.aggregation) == ("ppo", 0.2, 0.2, "token")
    assert (plain.correction, plain.kl_early_stop, plain.entropy_coef, plain.dual_clip) == (None, None, 0.0, None)
    knobs = loss(
        actor=actor(eps_clip_low_high=[0.1, 0.3], dual_clip=3.0, entropy_coef=0.01),
        algo={
            "advantage": {
                "is_correction_enable": True,
                "is_correction_type": "icepop",
                "is_correction_threshold": [0.4, 2.0],
            },
            "kl": {"early_stop": 0.05},
            "loss_agg": "constant",
        },
        train={"batch_size": 2},
    )
    assert (knobs.clip_low, knobs.clip_high, knobs.dual_clip, knobs.entropy_coef) == (0.1, 0.3, 3.0, 0.01)
    assert knobs.correction == Correction("icepop", 0.4, 2.0)
    assert (knobs.kl_early_stop, knobs.aggregation, knobs.max_tokens) == (0.05, "constant", 4)


@pytest.mark.parametrize(
    ("kind", "expected"), [("tis", (0.0, 2.0)), ("icepop", (0.5, 5.0)), ("seq-mask-tis", (0.5, 5.0))]
)
def test_a_correction_has_the_range_of_its_kind_unless_one_is_set(kind: str, expected: tuple[float, float]) -> None:
    correction = {"is_correction_enable": True, "is_correction_type": kind}
    settings = loss(algo={"advantage": correction}).correction
    assert (settings.low, settings.high) == expected
    settings = loss(algo={"advantage": correction | {"is_correction_threshold": [0.4, 3.0]}}).correction
    assert (settings.low, settings.high) == (0.4, 3.0)


def test_truncated_importance_sampling_raises_no_weight_at_its_defaults() -> None:
    tis = loss(algo={"advantage": {"is_correction_enable": True}}).correction
    # To the trainer the token is e^-5 times as probable as to the engine.
    tokens = {"sampled": torch.tensor([[True]]), "owner": torch.tensor([[0]])}
    weight = correct(tis, old=torch.tensor([[-6.0]]), rollout=torch.tensor([[-1.0]]), **tokens)
    assert float(weight) == pytest.approx(0.0067379, abs=1e-6)


def test_gspo_has_its_papers_range_and_averages_over_responses() -> None:
    gspo = loss(actor=actor(policy_loss_type="gspo"))
    assert (gspo.kind, gspo.clip_low, gspo.clip_high, gspo.aggregation) == ("gspo", 3e-4, 4e-4, "sequence")
    user_set = loss(actor=actor(policy_loss_type="gspo", eps_clip=0.1))
    assert (user_set.clip_low, user_set.clip_high) == (0.1, 0.1)


def test_the_path_of_a_users_loss_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert loss(actor=actor(policy_loss_type="mine.py:loss")).kind == f"{tmp_path}/mine.py:loss"
    assert absolute("~/mine.py:loss") == f"{Path.home()}/mine.py:loss"


def test_a_critics_settings_are_all_resolved() -> None:
    settings = critic_settings(config(algo=GAE), None, num_rows=8)
    critic = settings.critic
    assert (critic.model_name_or_path, critic.zero_stage, critic.freeze_visual_encoder) == ("model", 2, False)
    assert settings.total_steps == 4


def test_policy_and_reference_score_the_same_distribution() -> None:
    rollout = {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 4, "temperature": 0.7}
    rl = config(algo={"kl": {"init_coef": 0.1}}, ref={"model_name_or_path": "other"}, rollout=rollout)
    policy, reference = policy_settings(rl, None, num_rows=8), reference_settings(rl)
    assert (policy.temperature, policy.bans) == (reference.temperature, reference.bans) == (0.7, True)
    assert (policy.columns, policy.vision, policy.ds) == (reference.columns, reference.vision, reference.ds)
    assert (policy.actor.model_name_or_path, reference.actor.model_name_or_path) == ("model", "other")
    # Below top_p 1 the engines report the model's own log-probs, without bans.
    nucleus = config(rollout=rollout | {"top_p": 0.9, "temperature": 1.0})
    assert not policy_settings(nucleus, None, num_rows=8).bans


def test_supervised_training_has_neither_a_policy_loss_nor_a_moving_average() -> None:
    sft = SftConfig.model_validate({"actor": actor(), "data": {"prompt_dataset": "toy"}, "train": {"batch_size": 4}})
    settings = policy_settings(sft, None, num_rows=8)
    assert (settings.loss, settings.temperature, settings.bans, settings.ema_beta) == (None, 1.0, False, None)
    averaging = config(train={"batch_size": 4, "enable_ema": True, "ema_beta": 0.9})
    assert policy_settings(averaging, None, num_rows=8).ema_beta == 0.9


def test_a_reward_model_scores_responses_and_a_process_model_their_steps() -> None:
    both = {
        "model_name_or_path": "outcome",
        "normalize_enable": True,
        "process_model_name_or_path": "process",
        "process_separator": ".",
    }
    settings = reward_model_settings(config(reward=both))
    assert {role: (model.path, model.flag) for role, model in settings.items()} == {
        "reward_model": ("outcome", "reward.model_name_or_path"),
        "process_model": ("process", "reward.process_model_name_or_path"),
    }
    assert [(model.normalize, model.separator) for model in settings.values()] == [(True, None), (False, ".")]
    assert reward_model_settings(config()) == {}


def test_engines_get_only_an_adapter_that_vllm_applies_exactly() -> None:
    plan = AdapterPlan(8, 16.0, 0.0, False, False, targets=("q",), groups=frozenset({"language"}))
    merged = replace(plan, groups=frozenset({"language", "vision"}))
    assert engine_settings(config(), plan).adapter is plan
    assert engine_settings(config(), merged).adapter is None
    assert engine_settings(config()).max_model_len == config().data.max_len + 4


def test_reward_models_alone_need_no_rewarder_and_the_path_of_a_users_function_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rewarder_settings(config(reward={"functions": {}, "model_name_or_path": "outcome"})) is None
    settings = rewarder_settings(config(reward={"functions": {}, "remote_url": "mine.py:reward"}))
    assert settings is not None
    assert settings.reward.user_function == f"{tmp_path}/mine.py:reward"


@pytest.mark.parametrize(
    "module", ["learning.settings", "rollout.settings", "cluster.rewards", "cluster.data", "cluster.worker_group"]
)
def test_importing_settings_imports_no_framework(module: str) -> None:
    heavy = {"torch", "transformers", "vllm", "deepspeed", "peft"}
    code = f"import sys, vlmrl.{module}; print(sorted(set(sys.modules) & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_build_method_of_settings_can_be_pickled() -> None:
    settings = engine_settings(config())
    build = pickle.loads(pickle.dumps(settings.build))
    assert build.__self__ == settings


def test_the_schedule_spans_all_optimizer_steps() -> None:
    twice = config(train={"batch_size": 2, "max_epochs": 3})
    # 8 rows are 4 steps of 2 prompts, each with 2 optimizer steps of 2 responses, 3 times over.
    assert (last_step(twice, 8), optimizer_steps(twice, 8)) == (4, 24)


def test_a_run_resumed_with_another_batch_size_ends_after_all_rows() -> None:
    # 64 rows in batches of 4 are 16 steps. After 5 of them 44 rows are left: 5 steps of 8, or 22 of 2.
    by_size = {
        size: config(rollout={"batch_size": size, "n_samples_per_prompt": 2, "max_new_tokens": 4}) for size in (2, 4, 8)
    }
    steps = {size: last_step_from(settings, 64, done=5, drawn=20) for size, settings in by_size.items()}
    assert steps == {2: 5 + 22, 4: 16, 8: 5 + 5}
    assert fraction_done(by_size[8], 64, done=5, drawn=20) == 20 / 64
    assert last_step_from(by_size[4], 64, done=0, drawn=0) == last_step(by_size[4], 64)
    assert last_step_from(by_size[4], 64, done=20, drawn=80) == 20, "the new limit is below the steps already made"
    assert fraction_done(by_size[4], 64, done=20, drawn=80) == 1.0


def test_a_resumed_run_is_still_limited_by_max_steps() -> None:
    short = config(train={"batch_size": 4, "max_steps": 7})
    assert last_step_from(short, 64, done=5, drawn=20) == 7
    assert fraction_done(short, 64, done=5, drawn=20) == 5 / 7


def test_dynamic_filtering_may_take_as_many_steps_as_without_it() -> None:
    filtering = config(algo={"dynamic_filtering_enable": True})
    assert last_step_from(filtering, 64, done=5, drawn=40) == 32
    assert last_step_from(filtering, 64, done=31, drawn=60) == 33, "its batches were smaller before"


def test_the_actors_schedule_spans_its_own_steps() -> None:
    gae = config(algo=GAE, critic={"freezing_steps": 3})
    assert (optimizer_steps(gae, 8), optimizer_steps(gae, 8, frozen=3)) == (4, 1)
    with pytest.raises(ConfigError, match=r"critic\.freezing_steps 4 leaves the actor none of the run's 4 steps"):
        optimizer_steps(gae, 8, frozen=4)


def test_the_demand_of_an_engine_follows_from_batch_sizes_and_evaluation() -> None:
    rollout = {"batch_size": 256, "n_samples_per_prompt": 16, "max_new_tokens": 8}
    data = {"prompt_dataset": "d", "max_len": 1000}
    # 256 prompts over two engines: 64 each at a time, 16 responses to each.
    of_rollouts = demand(config(rollout=rollout, data=data, vllm={"num_engines": 2}, train={"batch_size": 64}))
    assert of_rollouts == (64 * 16, 64, 1000)
    of_small_batch = demand(config(rollout=rollout | {"batch_size": 8}, data=data, train={"batch_size": 64}))
    assert of_small_batch == (8 * 16, 8, 1000)
    # Evaluation asks for 64 prompts at once, which is more here.
    evaluation = {"dataset": "e", "n_samples_per_prompt": 4}
    of_evaluation = demand(
        config(rollout=rollout | {"batch_size": 8}, data=data, eval=evaluation, train={"batch_size": 64})
    )
    assert of_evaluation == (64 * 4, 8, 1000)
