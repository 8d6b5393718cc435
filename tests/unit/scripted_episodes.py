"""Rollouts of several turns and segments, from their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmrl.types import ChatMessage, Episode, Media, Prompt, Rollout, Segment, Turn

Spans = Sequence[Sequence[int]]
"""Tokens of a segment: those before the first response, the first response, feedback, the next response, and so on."""


def make_segment(
    spans: Spans, rewards: Sequence[float] = (), *, version: int = 0, media: tuple[Media, ...] = ()
) -> Segment:
    """A segment whose log-probs are -0.5 where sampled. `rewards` are those of its turns, 0 by default."""
    tokens = np.array([token for span in spans for token in span], dtype=np.int64)
    sampled = np.array([place % 2 == 1 for place, span in enumerate(spans) for _ in span], dtype=np.bool_)
    ends = np.cumsum([len(span) for span in spans])
    given = [*rewards, *[0.0] * len(spans)]
    turns = tuple(
        Turn(int(ends[k] - len(spans[k])), int(ends[k]), given[k // 2]) for k in range(1, len(spans), 2) if spans[k]
    )
    logprobs = np.where(sampled, -0.5, 0.0).astype(np.float32)
    return Segment(tokens, sampled, logprobs, np.where(sampled, version, -1), turns, media)


def make_episode_rollout(*segments: Segment, finish: str = "stop", **episode: Any) -> Rollout:
    """A conversation; one without sampled tokens and with `failure` has failed."""
    messages = tuple(ChatMessage("assistant", ("said",), reward=turn.reward) for s in segments for turn in s.turns)
    course = Episode(**{"stop": "done", "messages": messages} | episode)
    return Rollout(segments, "said", finish, course)  # type: ignore[arg-type]


def failed_rollout(prompt: Prompt, problem: str = "the environment took over 60 s") -> Rollout:
    """A conversation whose environment was lost: the prompt, and no response."""
    segment = make_segment([prompt.tokens.tolist()], media=prompt.media)
    lost = {"failure": "infrastructure", "problem": problem, "retried": (problem, problem)}
    return make_episode_rollout(segment, stop="failed", **lost)
