"""The course of an episode: a conversation of the policy with an environment, as users and reward functions see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlmrl.types import Failure

StopReason = Literal["done", "context", "images", "turns", "raised", "failed"]
"""Why an episode ended: its environment was done; the feedback would have exceeded `agent.context_len` or
`agent.max_images`; `agent.max_turns` were made; the environment raised; or it hung or died more often than
`agent.max_retries`."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation, for users and reward functions."""

    role: Literal["user", "assistant", "tool"]
    text: str
    images: tuple[str, ...] = ()
    """Hashes of its images."""
    reward: float | None = None
    """Reward of the environment for a response of the policy."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The course of a conversation with an environment."""

    stop: StopReason
    messages: tuple[ChatMessage, ...]
    """The conversation after the prompt."""
    env_s: float = 0.0
    """Seconds spent in the environment."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Tool calls that could not be parsed, did not fit the schema, or raised."""
    retries: int = 0
    """Number of times it was played again because the environment hung or died."""
    timeouts: int = 0
    """How many of those hung."""
    failure: Failure | None = None
    problem: str | None = None
    """Why it failed, in one line for users."""
