"""What the settings say reaches the roles."""

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
    policy_loss,
    policy_settings,
    reference_settings,
    reward_model_settings,
    rewarder_settings,
)
from vlmrl.config.run import SftConfig
from vlmrl.config.schedule import fraction_done, last_step, last_step_from, optimizer_steps
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan

GAE = {"advantage": {"estimator": "gae"}}


def loss(**changes: Any) -> Any:
    return policy_loss(config(**changes))


def actor(**changes: Any) -> dict[str, Any]:
    return {"model_name_or_path": "model"} | changes


def test_every_knob_of_the_loss_comes_from_its_setting() -> None:
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
    assert (knobs.kl_early_stop, knobs.aggregation, knobs.max_new_tokens) == (0.05, "constant", 4)


@pytest.mark.parametrize(
    ("kind", "expected"), [("tis", (0.0, 2.0)), ("icepop", (0.5, 5.0)), ("seq-mask-tis", (0.5, 5.0))]
)
def test_a_correction_has_the_range_of_its_kind_unless_one_is_given(kind: str, expected: tuple[float, float]) -> None:
    given = {"is_correction_enable": True, "is_correction_type": kind}
    found = loss(algo={"advantage": given}).correction
    assert (found.low, found.high) == expected
    found = loss(algo={"advantage": given | {"is_correction_threshold": [0.4, 3.0]}}).correction
    assert (found.low, found.high) == (0.4, 3.0)


def test_truncated_importance_sampling_raises_no_weight_at_its_defaults() -> None:
    tis = loss(algo={"advantage": {"is_correction_enable": True}}).correction
    # The trainer finds the token e^-5 as probable as the engine did.
    given = {"sampled": torch.tensor([[True]]), "owner": torch.tensor([[0]])}
    weight = correct(tis, old=torch.tensor([[-6.0]]), rollout=torch.tensor([[-1.0]]), **given)
    assert float(weight) == pytest.approx(0.0067379, abs=1e-6)


def test_gspo_has_its_papers_range_and_weighs_answers() -> None:
    gspo = loss(actor=actor(policy_loss_type="gspo"))
    assert (gspo.kind, gspo.clip_low, gspo.clip_high, gspo.aggregation) == ("gspo", 3e-4, 4e-4, "sequence")
    own = loss(actor=actor(policy_loss_type="gspo", eps_clip=0.1))
    assert (own.clip_low, own.clip_high) == (0.1, 0.1)


def test_a_file_of_the_users_is_found_from_wherever_a_rank_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert loss(actor=actor(policy_loss_type="mine.py:loss")).kind == f"{tmp_path}/mine.py:loss"
    assert absolute("~/mine.py:loss") == f"{Path.home()}/mine.py:loss"


def test_a_critic_gets_settings_that_leave_nothing_open() -> None:
    settings = critic_settings(config(algo=GAE), None, num_rows=8)
    critic = settings.critic
    assert (critic.model_name_or_path, critic.zero_stage, critic.freeze_visual_encoder) == ("model", 2, False)
    assert settings.total_steps == 4


def test_policy_and_reference_answer_the_same_question() -> None:
    rollout = {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 4, "temperature": 0.7}
    rl = config(algo={"kl": {"init_coef": 0.1}}, ref={"model_name_or_path": "other"}, rollout=rollout)
    policy, reference = policy_settings(rl, None, num_rows=8), reference_settings(rl)
    assert (policy.temperature, policy.bans) == (reference.temperature, reference.bans) == (0.7, True)
    assert (policy.columns, policy.vision, policy.ds) == (reference.columns, reference.vision, reference.ds)
    assert (policy.actor.model_name_or_path, reference.actor.model_name_or_path) == ("model", "other")
    # Below top_p 1 the engines report the model's own log-probs, without bans.
    nucleus = config(rollout=rollout | {"top_p": 0.9, "temperature": 1.0})
    assert not policy_settings(nucleus, None, num_rows=8).bans


def test_supervised_training_has_no_loss_of_rewards_and_no_moving_average() -> None:
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
    assert {role: (one.path, one.flag) for role, one in settings.items()} == {
        "reward_model": ("outcome", "reward.model_name_or_path"),
        "process_model": ("process", "reward.process_model_name_or_path"),
    }
    assert [(one.normalize, one.separator) for one in settings.values()] == [(True, None), (False, ".")]
    assert reward_model_settings(config()) == {}


def test_only_an_adapter_that_vllm_applies_exactly_is_the_engines() -> None:
    plan = AdapterPlan(8, 16.0, 0.0, False, False, targets=("q",), groups=frozenset({"language"}))
    merged = replace(plan, groups=frozenset({"language", "vision"}))
    assert engine_settings(config(), plan).adapter is plan
    assert engine_settings(config(), merged).adapter is None
    assert engine_settings(config()).max_model_len == config().data.max_len + 4


def test_models_alone_need_no_rewarder_and_a_file_is_found_wherever_the_worker_stands(
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
def test_settings_reach_a_process_without_what_other_roles_import(module: str) -> None:
    heavy = {"torch", "transformers", "vllm", "deepspeed", "peft"}
    code = f"import sys, vlmrl.{module}; print(sorted(set(sys.modules) & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_travel_with_the_way_to_build_from_them() -> None:
    settings = engine_settings(config())
    build = pickle.loads(pickle.dumps(settings.build))
    assert build.__self__ == settings


def test_the_schedule_spans_every_optimizer_step() -> None:
    twice = config(train={"batch_size": 2, "max_epochs": 3})
    # 8 rows are 4 steps of 2 prompts, each with 2 optimizer steps of 2 answers, 3 times over.
    assert (last_step(twice, 8), optimizer_steps(twice, 8)) == (4, 24)


def test_a_run_that_goes_on_with_other_batches_ends_with_its_rows() -> None:
    # 64 rows in batches of 4 are 16 steps. After 5 of them 44 rows are left: 5 steps of 8, or 22 of 2.
    of = {
        size: config(rollout={"batch_size": size, "n_samples_per_prompt": 2, "max_new_tokens": 4}) for size in (2, 4, 8)
    }
    steps = {size: last_step_from(settings, 64, done=5, drawn=20) for size, settings in of.items()}
    assert steps == {2: 5 + 22, 4: 16, 8: 5 + 5}
    assert fraction_done(of[8], 64, done=5, drawn=20) == 20 / 64
    assert last_step_from(of[4], 64, done=0, drawn=0) == last_step(of[4], 64)
    assert last_step_from(of[4], 64, done=20, drawn=80) == 20, "fewer episodes than it has made"
    assert fraction_done(of[4], 64, done=20, drawn=80) == 1.0


def test_a_run_that_goes_on_is_still_bounded_by_its_steps() -> None:
    short = config(train={"batch_size": 4, "max_steps": 7})
    assert last_step_from(short, 64, done=5, drawn=20) == 7
    assert fraction_done(short, 64, done=5, drawn=20) == 5 / 7


def test_a_run_that_sifts_may_take_as_many_steps_as_if_every_group_taught() -> None:
    sifting = config(algo={"dynamic_filtering_enable": True})
    assert last_step_from(sifting, 64, done=5, drawn=40) == 32
    assert last_step_from(sifting, 64, done=31, drawn=60) == 33, "its batches were smaller before"


def test_the_actors_schedule_spans_the_steps_that_it_takes() -> None:
    gae = config(algo=GAE, critic={"freezing_steps": 3})
    assert (optimizer_steps(gae, 8), optimizer_steps(gae, 8, frozen=3)) == (4, 1)
    with pytest.raises(ConfigError, match=r"critic\.freezing_steps 4 leaves the actor none of the run's 4 steps"):
        optimizer_steps(gae, 8, frozen=4)


def test_an_engine_is_told_what_it_will_have_under_way() -> None:
    rollout = {"batch_size": 256, "n_samples_per_prompt": 16, "max_new_tokens": 8}
    data = {"prompt_dataset": "d", "max_len": 1000}
    # 256 prompts over two engines: 64 each at a time, 16 responses to each.
    found = demand(config(rollout=rollout, data=data, vllm={"num_engines": 2}, train={"batch_size": 64}))
    assert found == (64 * 16, 64, 1000)
    alone = demand(config(rollout=rollout | {"batch_size": 8}, data=data, train={"batch_size": 64}))
    assert alone == (8 * 16, 8, 1000)
    # Evaluation asks for 64 prompts at once, which is more here.
    held = {"dataset": "e", "n_samples_per_prompt": 4}
    measured = demand(config(rollout=rollout | {"batch_size": 8}, data=data, eval=held, train={"batch_size": 64}))
    assert measured == (64 * 4, 8, 1000)
