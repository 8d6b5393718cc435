"""Settings of the gateway, and of `vlmrl serve`."""

from typing import Any

import pytest
from config.test_agent import AGENT, evaluation, rl
from config.test_verbs import nest
from pydantic import ValidationError

from vlmrl.config.gateway import Gateway
from vlmrl.config.serving import PolicyServeConfig


def serve(**values: Any) -> PolicyServeConfig:
    return PolicyServeConfig.model_validate(nest({"actor.model_name_or_path": "m"} | values))


@pytest.mark.parametrize("make", [rl, evaluation])
def test_without_an_agent_its_settings_are_refused(make: Any) -> None:
    for name in Gateway.model_fields:
        assert make().unread()[f"gateway.{name}"] == "without train.agent_func_path there is no agent"
    with pytest.raises(ValidationError, match=r"gateway\.max_concurrent.* without train\.agent_func_path"):
        make(**{"gateway.max_concurrent": 3})
    assert make(**AGENT, **{"gateway.other_settings": "refuse"}).gateway.other_settings == "refuse"


def test_what_a_served_model_reads() -> None:
    config = serve(**{"gateway.port": 8000, "rollout.temperature": 0.7, "agent.tool_format": "hermes"})
    assert config.gateway.port == 8000
    for name in ("agent.max_turns", "rollout.batch_size", "vllm.num_engines", "data.input_key", "actor.adam.lr"):
        assert name not in PolicyServeConfig.settings()
    with pytest.raises(ValidationError, match=r"agent\.max_turns would not be read: vlmrl serve does not have it"):
        serve(**{"agent.max_turns": 3})
    with pytest.raises(ValidationError, match=r"agent\.context_len 1024 leaves no room for a prompt"):
        serve(**{"agent.context_len": 1024})
