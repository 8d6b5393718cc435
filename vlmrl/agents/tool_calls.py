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

_MARKS = re.compile(
    r"<tool_call|<\|tool_call|<\w+:tool_call|<function=|<start_function_call|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool|"
    r'\A\s*\{\s*"name"|\A\s*\[\w+\('
)
"""How calls begin in the formats of vLLM's parsers. Text with such a mark and no call is a call that failed."""
_THINKING, _END_OF_THINKING = "<think>", "</think>"
_NUM_LAST_TOKENS = 16
"""Last tokens of a prompt, which show whether it has begun the thinking of the response."""
_FAILED = "The tool call could not be parsed"


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


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """Finds the tool calls of responses. The responses stay as they are."""

    processor: Processor
    parser: TextParser
    tool_format: str
    """Name of the format, which is vLLM's name of the parser."""

    def parse(self, response: Ints, *, prompt: Ints) -> ToolCalls:
        """Return the tool calls of a response [T] to a prompt [T']. Calls in its thinking do not count."""
        text = self.text(response)
        if _END_OF_THINKING not in text and (text.lstrip().startswith(_THINKING) or self._begins_thinking(prompt)):
            return ToolCalls()
        text = text.rpartition(_END_OF_THINKING)[2]
        try:
            raw = list(self.parser(text))
        except Exception as error:  # vLLM's parsers meet whatever a policy writes
            return ToolCalls(problem=f"{_FAILED}: {one_line(error, max_chars=200)}.")
        if len(raw) > MAX_CALLS:
            return ToolCalls(problem=f"{len(raw)} tool calls in one response are too many: at most {MAX_CALLS}.")
        if not raw:
            return ToolCalls(problem=self._problem(text) if _MARKS.search(text) else None)
        calls = []
        for i, (name, arguments, call_id) in enumerate(raw):
            parsed = _arguments(arguments)
            if not name:
                return ToolCalls(problem="The tool call has no name.")
            if parsed is None:
                return ToolCalls(problem=f"The arguments of {one_line(name, max_chars=80)} are not a JSON object.")
            calls.append(ToolCall(name, parsed, call_id if call_id and call_id in text else _call_id(text, i)))
        return ToolCalls(tuple(calls))

    def text_before(self, response: Ints) -> str:
        """Return the text of a response before its first tool call, without control tokens."""
        text = self.text(response)
        thinking, end, rest = text.rpartition(_END_OF_THINKING)
        mark = _MARKS.search(rest)
        before = thinking + end + (rest[: mark.start()] if mark else rest)
        for token in self.processor.tokenizer.all_special_tokens:
            before = before.replace(str(token), "")
        return before.strip()

    def text(self, response: Ints) -> str:
        """Decode a response with its control tokens, some of which mark calls, but without its end token."""
        tokens = [int(token) for token in response]
        if tokens and tokens[-1] in self.processor.eos_token_ids:
            tokens.pop()
        return str(self.processor.tokenizer.decode(tokens, skip_special_tokens=False))

    def _begins_thinking(self, prompt: Ints) -> bool:
        """Whether the prompt ends with the beginning of a response that thinks, as of models that always do."""
        text = self.processor.tokenizer.decode(prompt[-_NUM_LAST_TOKENS:].tolist(), skip_special_tokens=False)
        return str(text).rstrip().endswith(_THINKING)

    def _problem(self, text: str) -> str:
        """Say that a call failed, and why if it is in Hermes' format."""
        bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)
        for body in bodies if self.tool_format == "hermes" else ():
            try:
                call = json.loads(body)
            except (ValueError, RecursionError) as error:
                return f"{_FAILED}: {one_line(error, max_chars=200)}."
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
                return f'{_FAILED}: it must be a JSON object with "name" and "arguments".'
        return f"{_FAILED}."


def _arguments(arguments: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _call_id(text: str, number: int) -> str:
    """Return nine letters and digits, which Mistral's templates want: equal in equal runs, unlike vLLM's."""
    return hashlib.blake2b(f"{number}/{text}".encode(errors="replace"), digest_size=5).hexdigest()[:9]
