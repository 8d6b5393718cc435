"""Groups of responses as plain JSON values, for checkpoints: exact to the bit, without pixels.

A run that resumes draws the prompts again. They bring their images, which the segments of a saved group refer to by
hash.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrl.types import ChatMessage, Episode, Group, Media, Prompt, Rollout, Segment, Turn

Plain = dict[str, Any]

_DTYPES = {"tokens": "<i8", "request": "<i8", "sampled": "|b1", "logprobs": "<f4", "versions": "<i8"}
"""Type of each array: little-endian on every machine."""


def can_save(group: Group, row: Prompt) -> bool:
    """Whether all images of a group are those of its row's prompt. Others, of an environment, cannot be drawn again."""
    known = {media.hash for media in row.media}
    return all(media.hash in known for segment in group.segments for media in (*group.prompt.media, *segment.media))


def encode(group: Group) -> Plain:
    """Return a group as JSON values. What its prompt has from the row is left out."""
    prompt = group.prompt
    return {
        "prompt": {
            "text": prompt.text,
            "is_chat": prompt.is_chat,
            "media": [media.hash for media in prompt.media],
            "messages": [_encode_message(message) for message in prompt.messages],
            **_arrays(prompt, "tokens", "request"),
        },
        "rollouts": [_encode_rollout(rollout) for rollout in group.rollouts],
    }


def decode(plain: Plain, row: Prompt) -> Group:
    """Return a saved group; `row` is its prompt, drawn again.

    Raises KeyError if the prompt lacks an image of the group.
    """
    media = {item.hash: item for item in row.media}
    saved = plain["prompt"]
    prompt = replace(
        row,
        text=saved["text"],
        is_chat=saved["is_chat"],
        media=_by_hash(saved["media"], media),
        messages=_decode_messages(saved["messages"], media),
        tokens=_array(saved["tokens"], "tokens"),
        request=_array(saved["request"], "request"),
    )
    return Group(prompt, tuple(_decode_rollout(rollout, media) for rollout in plain["rollouts"]))


def oldest_version(plain: Plain) -> int:
    """Return the oldest version of weights that sampled a token of a saved group; one that is never too old if none was
    sampled."""
    segments = [segment for rollout in plain["rollouts"] for segment in rollout["segments"]]
    versions = np.concatenate([_array(segment["versions"], "versions") for segment in segments])
    return int(versions[versions >= 0].min(initial=np.iinfo(np.int64).max))


def _encode_rollout(rollout: Rollout) -> Plain:
    return {
        "segments": [
            {
                **_arrays(segment, "tokens", "sampled", "logprobs", "versions"),
                "turns": [[turn.start, turn.end, turn.reward] for turn in segment.turns],
                "media": [media.hash for media in segment.media],
            }
            for segment in rollout.segments
        ],
        "text": rollout.text,
        "finish_reason": rollout.finish_reason,
        "episode": None if rollout.episode is None else _encode_episode(rollout.episode),
    }


def _encode_episode(episode: Episode) -> Plain:
    values = {field.name: getattr(episode, field.name) for field in fields(episode)}
    return values | {"messages": [_encode_message(message) for message in episode.messages]}


def _encode_message(message: ChatMessage) -> Plain:
    parts = [part if isinstance(part, str) else {"image": part.hash} for part in message.parts]
    return {"role": message.role, "parts": parts, "reward": message.reward}


def _decode_rollout(plain: Plain, media: Mapping[str, Media]) -> Rollout:
    segments = tuple(
        Segment(
            **{name: _array(segment[name], name) for name in ("tokens", "sampled", "logprobs", "versions")},
            turns=tuple(Turn(*turn) for turn in segment["turns"]),
            media=_by_hash(segment["media"], media),
        )
        for segment in plain["segments"]
    )
    return Rollout(segments, plain["text"], plain["finish_reason"], _decode_episode(plain["episode"], media))


def _decode_episode(plain: Plain | None, media: Mapping[str, Media]) -> Episode | None:
    if plain is None:
        return None
    read = {"messages": _decode_messages(plain["messages"], media), "retried": tuple(plain["retried"])}
    return Episode(**plain | read)


def _decode_messages(messages: Sequence[Plain], media: Mapping[str, Media]) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(
            message["role"],
            tuple(part if isinstance(part, str) else media[part["image"]] for part in message["parts"]),
            message["reward"],
        )
        for message in messages
    )


def _by_hash(hashes: list[str], media: Mapping[str, Media]) -> tuple[Media, ...]:
    return tuple(media[name] for name in hashes)


def _arrays(holder: Prompt | Segment, *names: str) -> dict[str, str]:
    arrays = {name: np.ascontiguousarray(getattr(holder, name), dtype=_DTYPES[name]) for name in names}
    return {name: base64.b64encode(array.tobytes()).decode("ascii") for name, array in arrays.items()}


def _array(text: str, name: str) -> NDArray[Any]:
    dtype = np.dtype(_DTYPES[name])
    # A copy: arrays over bytes are read-only.
    return np.frombuffer(base64.b64decode(text), dtype=dtype).astype(dtype.newbyteorder("="))
