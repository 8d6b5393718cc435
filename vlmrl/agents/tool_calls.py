"""Tool calls of a response: found by the parser of the model's format, on a copy of its text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vlmrl.plugins import Processor
from vlmrl.system.plain_text import one_line
from vlmrl.types import Ints

TextParser = Callable[[str], Sequence[tuple[str, str, str]]]
"""Return (name, arguments as JSON, id) of the calls in a text. `vlmrl.rollout.tool_parsers` has vLLM's."""

MAX_CALLS = 16
"""Tool calls of one response."""

_MARKERS = re.compile(r"<tool_call|<\|?tool_calls?|<function=|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool|<start_function")
"""How calls begin in the formats of vLLM's parsers. Text with such a mark and no call is a call that failed."""
_END_OF_THINKING = "</think>"


class ToolSchema(Protocol):
    """A tool of an environment."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, an object."""


class ToolCall(NamedTuple):
    """A call of a tool, as the policy wrote it: the tool may not exist, and the arguments may not fit it."""

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The tool calls of a response, or why they could not be parsed."""

    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None
    """One line for the policy. There are no calls then."""


def as_function(tool: ToolSchema) -> dict[str, Any]:
    """Return the tool in OpenAI's format, which chat templates and parsers take."""
    parameters = dict(tool.parameters)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def text_with_control_tokens(response: Ints, processor: Processor) -> str:
    """Decode a response with its control tokens, some of which mark calls, but without its end token."""
    tokens = [int(token) for token in response]
    if tokens and tokens[-1] in processor.eos_token_ids:
        tokens.pop()
    return str(processor.tokenizer.decode(tokens, skip_special_tokens=False))


def parse(response: Ints, processor: Processor, parser: TextParser) -> ToolCalls:
    """Return the tool calls of a response. Calls in its thinking do not count."""
    text = text_with_control_tokens(response, processor)
    if text.lstrip().startswith("<think>") and _END_OF_THINKING not in text:
        return ToolCalls()
    text = text.rpartition(_END_OF_THINKING)[2]
    try:
        found = list(parser(text))
    except Exception as error:  # vLLM's parsers meet whatever a policy writes
        return ToolCalls(problem=f"The tool call could not be parsed: {one_line(error, max_chars=200)}")
    if len(found) > MAX_CALLS:
        return ToolCalls(problem=f"{len(found)} tool calls in one response are too many: at most {MAX_CALLS}.")
    if not found:
        return ToolCalls(problem=_problem(text) if _MARKERS.search(text) else None)
    calls = []
    for i, (name, arguments, call_id) in enumerate(found):
        parsed = _arguments(arguments)
        if not name:
            return ToolCalls(problem="The tool call has no name.")
        if parsed is None:
            return ToolCalls(problem=f"The arguments of {one_line(name, max_chars=80)} are not a JSON object.")
        calls.append(ToolCall(name, parsed, call_id if call_id and call_id in text else _call_id(text, i)))
    return ToolCalls(tuple(calls))


def _arguments(arguments: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _problem(text: str) -> str:
    """Say why a call in Hermes' format failed, or that it did."""
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError) as error:
            return f"The tool call could not be parsed: {one_line(error, max_chars=200)}."
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return 'The tool call could not be parsed: it must be a JSON object with "name" and "arguments".'
    return "The tool call could not be parsed."


def _call_id(text: str, number: int) -> str:
    """Return nine letters and digits, which Mistral's templates want: equal in equal runs, unlike vLLM's."""
    return hashlib.blake2b(f"{number}/{text}".encode(errors="replace"), digest_size=5).hexdigest()[:9]
