"""Conversations with an environment, and their checks."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.base import Fraction, PositiveFloat, PositiveInt, Section, Text, Unread
from vlmrl.config.names import settings
from vlmrl.config.rollout import Rollout


class Agent(Section):
    """Conversations of the policy with the environment of `train.agent_func_path`."""

    max_turns: PositiveInt = 8
    """Maximum number of responses in a conversation, tool calls included; each has up to `rollout.max_new_tokens`."""
    context_len: PositiveInt = 8192
    """Maximum number of tokens of a conversation: prompt, images, responses and feedback together."""
    max_images: PositiveInt = 16
    """Maximum number of images of a conversation, those of the prompt included; a row with more is dropped and
    counted."""
    step_limit_s: PositiveFloat = 60.0
    """Time limit of one call of the environment: its `reset`, a `step`, or a tool."""
    episode_limit_s: PositiveFloat = 600.0
    """Time limit of all calls of an episode together, or of the `run` of an agent; without the time of the engines."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """How many times an episode is played again whose environment hung or died; after that it has failed, and is left
    out of the loss."""
    max_failed_fraction: Fraction = 0.1
    """The run stops when more than this fraction of a step's episodes have failed."""
    num_workers: PositiveInt | None = None
    """Processes of each engine that hold environments. A synchronous environment has a process to itself, so this is
    the number of episodes that an engine plays at a time, by default 64; asynchronous ones share the processes by the
    hundred, by default 4."""
    history: Literal["keep", "template"] = "keep"
    """How the policy reads its earlier responses. `keep`: their tokens as sampled. `template`: as the chat template
    renders them, which for Qwen3 means without thinking; training then has one sequence per rewritten history."""
    tool_format: Text = "auto"
    """Format of tool calls: the name of one of vLLM's tool parsers, such as `hermes`; `auto`: that of the model's
    family."""
    pass_env: tuple[Text, ...] = ()
    """Environment variables with tokens or keys that your environment needs. Other variables with names of secrets are
    hidden from it."""


def unread_of_agent(*, has_agent: bool) -> Unread:
    if has_agent:
        return {}
    return dict.fromkeys(settings(Agent, "agent."), "without train.agent_func_path there is no environment")


def longest_response(agent: Agent, rollout: Rollout, *, has_agent: bool) -> int:
    """Return the length of the longest possible response in sampled tokens, over all its turns."""
    if not has_agent:
        return rollout.max_new_tokens
    return min(agent.max_turns * rollout.max_new_tokens, agent.context_len)


def longest_sequence(agent: Agent, rollout: Rollout, *, max_len: int, has_agent: bool) -> int:
    """Return the length of the longest sequence in tokens; `max_len` is that of prompts."""
    return agent.context_len if has_agent else max_len + rollout.max_new_tokens


def settings_of_length(agent: Agent, rollout: Rollout, *, max_len: int, has_agent: bool) -> str:
    """Name the settings that `longest_sequence` follows from, with their values."""
    if has_agent:
        return f"agent.context_len {agent.context_len}"
    return f"data.max_len {max_len} and rollout.max_new_tokens {rollout.max_new_tokens}"


def conflicts_of_agent(agent: Agent, rollout: Rollout, *, max_len: int, has_agent: bool) -> list[str]:
    if not has_agent or max_len + rollout.max_new_tokens <= agent.context_len:
        return []
    conflict = (
        f"agent.context_len {agent.context_len} holds no prompt of data.max_len {max_len} with a response of "
        f"rollout.max_new_tokens {rollout.max_new_tokens}: raise it, or lower one of them"
    )
    return [conflict]
