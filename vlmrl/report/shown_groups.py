"""A prompt with its responses as the page gets it: without secrets, and without the middle of long texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from vlmrl.report.curves import shortened
from vlmrl.report.embedding import embedded_size
from vlmrl.report.transcript_lines import Group, Message, Response, TranscriptFile
from vlmrl.system.masking import Mask

_ROLES = ("system", "user", "assistant", "tool")
"""Roles that a page shows each in its way, whatever word is a secret here."""


class _Limits(NamedTuple):
    """What of a group is shown; of texts and conversations their middle is left out."""

    chars: int
    """Of a text."""
    messages: int
    """Of a conversation."""
    responses: int
    names: int
    """Of metadata, and of reward sources."""


_LIMITS = (
    _Limits(12_000, messages=60, responses=32, names=200),
    _Limits(6000, messages=60, responses=32, names=200),
    _Limits(3000, messages=60, responses=32, names=200),
    _Limits(1500, messages=60, responses=32, names=200),
    _Limits(750, messages=30, responses=16, names=50),
    _Limits(400, messages=12, responses=8, names=20),
    _Limits(200, messages=4, responses=4, names=10),
)
"""From the widest on: a group has the first within which it is small enough."""
_TRACES = 4
"""Largest size of a group's traces, as a multiple of that of the rest. Runs write those of 2,000 tokens of a step,
all in one group, whose texts need not make room for them."""


class ShownGroup(NamedTuple):
    """A group as data of the page."""

    record: Mapping[str, Any]

    @property
    def images(self) -> list[str]:
        """The images of the prompt, then those of the turns that are shown, each once."""
        turns = [m for response in self.record["responses"] for m in response.get("messages", ())]
        return list(dict.fromkeys([*self.record["images"], *(name for m in turns for name in m.get("images", ()))]))


def shown_group(file: TranscriptFile, group: Group, mask: Mask, *, max_bytes: int) -> ShownGroup:
    """Return a group of a transcript as the page shows it, in not much more than `max_bytes` of the page, and its
    traces in a multiple of that."""
    texts = _Texts(mask)
    for limits in _LIMITS:
        record = _record(file, group, texts, limits)
        if embedded_size(record) <= max_bytes:
            break
    traces = [_trace(response.trace, mask) if response.trace else {} for response in group.responses]
    if embedded_size(traces) <= _TRACES * max_bytes:
        for response, trace in zip(record["responses"], traces, strict=False):  # of some, only the first are shown
            response.update({"trace": trace} if trace else {})
    return ShownGroup(record)


class _Texts:
    """Texts of a group without secrets. Each is masked once, however often it is cut."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self._masked: dict[str, str] = {}

    def cut(self, text: str, limits: _Limits) -> str:
        """The text without secrets, and without the middle if it is long."""
        masked = self._masked.get(text)
        if masked is None:
            masked = self._masked[text] = str(self.mask.strings(text))
        left_out = len(masked) - limits.chars
        if left_out <= 0:
            return masked
        half = limits.chars // 2
        return f"{masked[:half]}\n[{left_out:,} characters are not shown]\n{masked[-half:]}"

    def names(self, values: Mapping[str, Any], limits: _Limits) -> dict[str, Any]:
        """The first values, under names without secrets."""
        return {self.cut(name, limits): value for name, value in islice(values.items(), limits.names)}


def _record(file: TranscriptFile, group: Group, texts: _Texts, limits: _Limits) -> dict[str, Any]:
    responses = [_response(response, texts, limits) for response in group.responses[: limits.responses]]
    left_out = len(group.responses) - len(responses)
    metadata = texts.names(group.metadata, limits)
    return {
        "set": texts.mask.strings(file.set),
        "step": file.step,
        "index": group.index,
        "source": texts.cut(group.source, _LIMITS[0]),  # the same prompt at other steps has the same
        "prompt": texts.cut(group.prompt, limits),
        "label": None if group.label is None else texts.cut(group.label, limits),
        "images": group.images,
        "metadata": {name: texts.cut(_plain(value), limits) for name, value in metadata.items()},
        **({"left_out": True} if group.left_out else {}),
        "responses": responses,
        **({"more": left_out} if left_out else {}),
    }


def _response(response: Response, texts: _Texts, limits: _Limits) -> dict[str, Any]:
    parts = texts.names(response.parts, limits)
    record = {
        "text": texts.cut(response.text, limits),
        "score": _short(response.score),
        "reward": _short(response.reward),
        "advantage": _short(response.advantage),
        "teacher_gap": _short(response.teacher_gap),
        "parts": {name: _short(value) for name, value in parts.items()},
        "tokens": response.tokens,
        "finish": response.finish_reason,
        "failure": None if response.failure is None else texts.cut(response.failure, limits),
        "problem": None if response.problem is None else texts.cut(response.problem, limits),
        "version": response.version,
        "stop": None if response.stop is None else texts.cut(response.stop, limits),
        "messages": [_message(message, texts, limits) for message in _without_middle(response.messages, limits)],
    }
    return {name: value for name, value in record.items() if value not in (None, [], {})}


def _message(message: Message, texts: _Texts, limits: _Limits) -> dict[str, Any]:
    record = {
        "role": message.role if message.role in _ROLES else texts.cut(message.role, limits),
        "text": texts.cut(message.text, limits),
        "images": message.images,
        "reward": _short(message.reward),
    }
    return {name: value for name, value in record.items() if value not in (None, [])}


def _without_middle(messages: Sequence[Message], limits: _Limits) -> list[Message]:
    left_out = len(messages) - limits.messages
    if left_out <= 0:
        return list(messages)
    half = limits.messages // 2
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


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else shortened(value)
