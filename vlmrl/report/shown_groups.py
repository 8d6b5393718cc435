"""A prompt with its responses as the page gets it: without secrets, and without the middle of long texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vlmrl.report.curves import shortened
from vlmrl.report.transcript_lines import Group, Message, Response, TranscriptFile
from vlmrl.system.masking import Mask, mask_urls

_MAX_CHARS = 12_000
"""A longer text is shown without its middle."""
_MAX_MESSAGES = 60
"""A longer conversation is shown without its middle."""
_ROLES = ("system", "user", "assistant", "tool")
"""Roles that a page shows each in its way, whatever word is a secret here."""
_MAX_RESPONSES = 32
"""Responses of a group that are shown."""


class ShownGroup(NamedTuple):
    """A group as data of the page, and what decides whether it is shown."""

    record: Mapping[str, Any]
    source: str
    worth: float
    spread: float
    left_out: bool
    has_trace: bool

    @property
    def images(self) -> list[str]:
        """The images of the prompt, then those of the turns that are shown, each once."""
        turns = [m for response in self.record["responses"] for m in response.get("messages", ())]
        return list(dict.fromkeys([*self.record["images"], *(name for m in turns for name in m.get("images", ()))]))


def shown_group(file: TranscriptFile, group: Group, mask: Mask) -> ShownGroup:
    """Return a group of a transcript as the page shows it."""
    responses = [_response(response, mask) for response in group.responses[:_MAX_RESPONSES]]
    left_out = len(group.responses) - len(responses)
    record = {
        "set": mask.strings(file.set),
        "step": file.step,
        "index": group.index,
        "source": _clipped(group.source, mask),
        "prompt": _clipped(group.prompt, mask),
        "label": None if group.label is None else _clipped(group.label, mask),
        "images": group.images,
        "metadata": {_clipped(n, mask): _clipped(_plain(value), mask) for n, value in group.metadata.items()},
        **({"left_out": True} if group.left_out else {}),
        "responses": responses,
        **({"more": left_out} if left_out else {}),
    }
    has_trace = any("trace" in response for response in responses)
    return ShownGroup(record, group.source, group.worth, group.spread, group.left_out, has_trace)


def _response(response: Response, mask: Mask) -> dict[str, Any]:
    record = {
        "text": _clipped(response.text, mask),
        "score": _short(response.score),
        "reward": _short(response.reward),
        "advantage": _short(response.advantage),
        "teacher_gap": _short(response.teacher_gap),
        "parts": {_clipped(name, mask): _short(value) for name, value in response.parts.items()},
        "tokens": response.tokens,
        "finish": response.finish_reason,
        "failure": None if response.failure is None else _clipped(response.failure, mask),
        "problem": None if response.problem is None else _clipped(response.problem, mask),
        "version": response.version,
        "stop": None if response.stop is None else _clipped(response.stop, mask),
        "messages": [_message(message, mask) for message in _without_middle(response.messages)],
        "trace": _trace(response.trace or {}, mask),
    }
    return {name: value for name, value in record.items() if value not in (None, [], {})}


def _message(message: Message, mask: Mask) -> dict[str, Any]:
    record = {
        "role": message.role if message.role in _ROLES else _clipped(message.role, mask),
        "text": _clipped(message.text, mask),
        "images": message.images,
        "reward": _short(message.reward),
    }
    return {name: value for name, value in record.items() if value not in (None, [])}


def _without_middle(messages: Sequence[Message]) -> list[Message]:
    left_out = len(messages) - _MAX_MESSAGES
    if left_out <= 0:
        return list(messages)
    half = _MAX_MESSAGES // 2
    return [*messages[:half], Message("", f"[{left_out} messages are not shown]"), *messages[-half:]]


def _trace(trace: Mapping[str, Any], mask: Mask) -> dict[str, list[Any]]:
    """The tokens with those columns that have a number or null for each of them."""
    tokens = trace.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return {}
    columns = {
        name: values
        for name, values in trace.items()
        if isinstance(values, list) and len(values) == len(tokens) and all(map(_is_number_or_null, values))
    }
    return {"tokens": mask.tokens(tokens)} | columns


def _is_number_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and -1e300 < value < 1e300)


def _clipped(text: str, mask: Mask) -> str:
    """The text without secrets, and without the middle if it is long."""
    text = mask_urls(mask.text(text))
    left_out = len(text) - _MAX_CHARS
    if left_out <= 0:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}\n[{left_out:,} characters are not shown]\n{text[-half:]}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else shortened(value)
