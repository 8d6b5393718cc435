"""Settings of conversations with an environment: conflicts, unread ones, defaults, and lengths."""

from typing import Any

import pytest
from config.test_verbs import nest
from pydantic import ValidationError

from vlmrl.config.agent import Agent
from vlmrl.config.verbs import EvalConfig, RlConfig

AGENT = {"train.agent_func_path": "my_env.py:make"}


def rl(**values: Any) -> RlConfig:
    needed = {"actor.model_name_or_path": "m", "data.prompt_dataset": "d"}
    return RlConfig.model_validate(nest(needed | values))


def evaluation(**values: Any) -> EvalConfig:
    return EvalConfig.model_validate(nest({"actor.model_name_or_path": "m", "eval.dataset": "d"} | values))


@pytest.mark.parametrize("make", [rl, evaluation])
def test_without_an_environment_its_settings_are_refused(make: Any) -> None:
    assert not make().has_agent
    for name in Agent.model_fields:
        assert make().unread()[f"agent.{name}"] == "without train.agent_func_path there is no environment"
    with pytest.raises(ValidationError, match=r"agent\.max_turns.* without train\.agent_func_path"):
        make(**{"agent.max_turns": 3})
    assert make(**AGENT, **{"agent.max_turns": 3}).agent.max_turns == 3


@pytest.mark.parametrize("make", [rl, evaluation])
def test_default_rewards_are_dropped_where_an_environment_gives_them(make: Any) -> None:
    assert make().reward.functions
    assert make(**AGENT).reward.functions == {}
    given = {"reward.functions": {"format": 1.0}}
    assert make(**AGENT, **given).reward.functions == given["reward.functions"]
    none = {"reward.functions": {}}  # as it is in the run's config.yaml
    assert make(**AGENT, **none).reward.functions == {}
    with pytest.raises(ValidationError, match="there is no reward"):
        make(**none)


@pytest.mark.parametrize("make", [rl, evaluation])
def test_a_context_that_holds_no_response_is_a_conflict(make: Any) -> None:
    lengths = {"data.max_len": 1000, "rollout.max_new_tokens": 200}
    assert make(**AGENT, **lengths, **{"agent.context_len": 1200}).agent.context_len == 1200
    with pytest.raises(ValidationError, match=r"agent\.context_len 1199 holds no prompt of data\.max_len 1000"):
        make(**AGENT, **lengths, **{"agent.context_len": 1199})


def test_lengths_of_responses_and_sequences() -> None:
    lengths = {"data.max_len": 100, "rollout.max_new_tokens": 50}
    plain = rl(**lengths)
    assert (plain.max_response_tokens, plain.max_sequence_tokens) == (50, 150)
    assert plain.settings_of_length == "data.max_len 100 and rollout.max_new_tokens 50"
    turns = rl(**AGENT, **lengths, **{"agent.max_turns": 3, "agent.context_len": 400})
    assert (turns.max_response_tokens, turns.max_sequence_tokens) == (150, 400)
    assert turns.settings_of_length == "agent.context_len 400"
    short = rl(**AGENT, **lengths, **{"agent.max_turns": 30, "agent.context_len": 400})
    assert short.max_response_tokens == 400


@pytest.mark.parametrize("path", ["my_env", ":make", "my_env.py:"])
def test_the_path_of_an_environment_names_a_file_and_a_function(path: str) -> None:
    assert rl(**{"train.agent_func_path": "my_env.py"}).train.agent_func_path == "my_env.py:make"
    with pytest.raises(ValidationError, match="agent_func_path"):
        rl(**{"train.agent_func_path": path})


def test_rewards_of_turns_are_those_of_tokens_for_estimators_without_a_group() -> None:
    by_token = {
        name: rl(**{"algo.advantage.estimator": name}).algo.advantage.rewards_turns
        for name in ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")
    }
    assert [name for name, rewards_turns in by_token.items() if rewards_turns] == ["gae", "reinforce"]
    assert not rl(**{"algo.advantage.estimator": "mine.py:estimate"}).algo.advantage.rewards_turns


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({}, False),
        ({"actor.policy_loss_type": "cispo"}, False),
        ({"actor.policy_loss_type": "gspo"}, True),
        ({"actor.policy_loss_type": "mine.py:loss"}, True),
        ({"algo.advantage.is_correction_enable": True}, False),
        ({"algo.advantage.is_correction_enable": True, "algo.advantage.is_correction_type": "seq-mask-tis"}, True),
    ],
)
def test_losses_that_read_whole_responses(settings: dict[str, Any], reads: bool) -> None:
    assert rl(**settings).loss_reads_responses == reads
