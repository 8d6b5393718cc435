"""Whatever a client sends is read or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agents.gateway.scripted import SAMPLING, ZOOM, picture
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.agents.gateway.bodies import MAX_CHOICES, MAX_VALUES, ChatBody, RefusedError, read_body

CALL = {"id": "call00001", "type": "function", "function": {"name": "zoom", "arguments": '{"x": 1}'}}
SOUND: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Where?"}, picture((1, 2, 3))], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "There."},
    ],
    "tools": [ZOOM],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 0,
    "stop": ["|"],
    "max_tokens": 5,
    "max_completion_tokens": 6,
    "temperature": 1.0,
    "top_p": 1,
    "presence_penalty": 0,
    "logit_bias": {},
    "user": "me",
    "functions": None,
}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in items for place in places(one, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def read_or_refused(content: bytes, other_settings: Any) -> ChatBody | RefusedError:
    try:
        return read_body(content, SAMPLING, other_settings=other_settings)
    except RefusedError as error:
        return error


@settings(max_examples=400, deadline=None)
@given(path=st.sampled_from(places(SOUND)), new=anything, other_settings=st.sampled_from(["override", "refuse"]))
def test_a_request_is_read_or_refused(path: tuple[Any, ...], new: Any, other_settings: Any) -> None:
    body = read_or_refused(json.dumps(changed(SOUND, path, new)).encode(), other_settings)
    if isinstance(body, RefusedError):
        assert body.status == 400
        assert str(body)
        assert "\n" not in str(body)
        return
    assert 1 <= body.n <= MAX_CHOICES
    assert body.max_tokens is None or body.max_tokens >= 1
    for text in (body.model, *body.stop, *(word for message in body.messages for word in message.words)):
        text.encode()


def test_a_sound_request_is_read() -> None:
    body = read_body(json.dumps(SOUND).encode(), SAMPLING, other_settings="refuse")
    assert [message.role for message in body.messages] == ["system", "user", "assistant", "tool"]
    assert body.messages[3].name == "zoom"
    assert (body.n, body.max_tokens, body.stop, body.overridden) == (2, 5, ("|",), ())


def test_millions_of_values_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(RefusedError, match="more than 2,000,000 values"):
        read_body(b"[" + b"1," * (MAX_VALUES + 1) + b"1]", SAMPLING, other_settings="override")


def test_a_strict_tool_is_constrained_sampling() -> None:
    strict = changed(SOUND, ("tools", 0, "function"), ZOOM["function"] | {"strict": True})  # type: ignore[operator]
    content = json.dumps(strict).encode()
    assert read_body(content, SAMPLING, other_settings="override").overridden == ("strict",)
    with pytest.raises(RefusedError, match="strict: the run samples with settings of its own"):
        read_body(content, SAMPLING, other_settings="refuse")
