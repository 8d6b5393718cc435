"""Read chat requests: JSON in OpenAI's format, of which nothing is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vlmrl.agents.gateway.chat import Call, Tools
from vlmrl.system.plain_text import one_line
from vlmrl.types import Role, Sampling

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_CHOICES = 64
MAX_STOPS = 16
MAX_PARTS = 4096
"""Texts and images of a request."""
MAX_VALUES = 2_000_000
"""Values of a request. The text of a conversation has half as many characters; a request of 32 MiB could have ten
million values, which take 700 MiB, and seconds in which no other Python runs."""
MAX_WORD_CHARS = 1000
"""Characters of a stop, and of the model's name, which responses repeat."""

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_OF_CHAT = {"messages", "model", "tools", "tool_choice", "response_format", "modalities"}
_OF_RESPONSE = {"n", "stream", "stream_options", "logprobs", "top_logprobs"}
_OF_SAMPLING = {"stop", "max_tokens", "max_completion_tokens", "temperature", "top_p"}
_READ = _OF_CHAT | _OF_RESPONSE | _OF_SAMPLING
_HARMLESS = frozenset(
    ["user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"]
)
"""Fields that do not change what is sampled."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "top_k": (-1, 0),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "parallel_tool_calls": (True,),
    "best_of": (1,),
}
"""Sampling settings whose values here change nothing."""
_NAMED = (*_NEUTRAL, "seed", "reasoning_effort", "verbosity", "stop_token_ids", "bad_words", "allowed_token_ids")
"""Sampling settings that are counted by their names when the run's are used; others are counted as `other`."""
_NEVER = {
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "the model writes text",
    "prediction": "the trainer could not reproduce it",
    "web_search_options": "there is no search",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar"),
        "the trainer could not reproduce constrained sampling",
    ),
}
"""Fields that are always refused."""


class RefusedError(Exception):
    """A request that gets an error instead of a response. `str` is one line for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(one_line(message, max_chars=1000))
        self.status, self.param, self.code, self.headers = status, param, code, headers


class ImageUrl(NamedTuple):
    """An image that has not been decoded."""

    url: str


class RawMessage(NamedTuple):
    """A message whose images have not been decoded."""

    role: Role
    parts: tuple[str | ImageUrl, ...]
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None

    @property
    def words(self) -> list[str]:
        """All its text besides its parts: names, ids and arguments."""
        of_calls = [word for call in self.calls for word in (call.id, call.name, call.arguments)]
        return [*of_calls, self.call_id or "", self.name or ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody:
    """A chat request."""

    model: str
    messages: tuple[RawMessage, ...]
    tools: Tools
    parses_calls: bool
    """False for `tool_choice` none: calls stay text."""
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    stop: tuple[str, ...]
    max_tokens: int | None
    overridden: tuple[str, ...]
    """Settings of the request that the run's replace."""


def read_body(content: bytes, sampling: Sampling, *, other_settings: Literal["override", "refuse"]) -> ChatBody:
    """Read a request to an episode with these sampling settings.

    Raises:
        RefusedError: with status 400.
    """
    try:
        return _read(read_object(content), sampling, other_settings)
    except RecursionError as error:
        raise RefusedError(400, "the request is nested too deeply") from error


def _read(body: Mapping[str, Any], sampling: Sampling, other_settings: Literal["override", "refuse"]) -> ChatBody:
    for name, advice in _NEVER.items():
        if body.get(name) is not None:
            raise _bad(name, f"{name} is not supported: {advice}")
    _check_formats(body)
    choice = _tool_choice(body)
    tools = _tools(body)
    overridden = (*_overridden(body, sampling), *choice.overridden, *tools.overridden)
    if overridden and other_settings == "refuse":
        raise _bad(
            overridden[0],
            f"{', '.join(overridden)}: the run samples with settings of its own (temperature {sampling.temperature:g}, "
            f"top_p {sampling.top_p:g}, tool_choice auto): leave them out, or set gateway.other_settings override",
        )
    limits = [n for name in ("max_completion_tokens", "max_tokens") if (n := _integer(body, name, 1, None)) is not None]
    options = body.get("stream_options") or {}
    return ChatBody(
        model=_text(body, "model", default="policy", max_chars=MAX_WORD_CHARS),
        messages=_messages(body),
        tools=Tools(tools.functions),
        parses_calls=bool(tools.functions) and choice.parses_calls,
        n=_integer(body, "n", 1, MAX_CHOICES) or 1,
        stream=_flag(body, "stream"),
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=_flag(body, "logprobs"),
        stop=_stop(body),
        max_tokens=min(limits, default=None),
        overridden=overridden,
    )


def read_object(content: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises RefusedError."""
    if sum(map(content.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise RefusedError(400, f"the request has more than {MAX_VALUES:,} values")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is not JSON: {one_line(error, max_chars=200)}") from error
    if not isinstance(body, dict):
        raise RefusedError(400, "the request must be a JSON object")
    return body


def _bad(param: str, message: str) -> RefusedError:
    return RefusedError(400, message, param=param)


def _check_formats(body: Mapping[str, Any]) -> None:
    response_format = body.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind not in (None, "text"):
        raise _bad(
            "response_format", "response_format: only text; the trainer could not reproduce constrained sampling"
        )
    if (_integer(body, "top_logprobs", 0, None) or 0) > 0:
        raise _bad("top_logprobs", "top_logprobs is not supported; logprobs has those of the sampled tokens")
    if body.get("modalities") not in (None, ["text"]):
        raise _bad("modalities", "modalities: only text")


def _overridden(body: Mapping[str, Any], sampling: Sampling) -> tuple[str, ...]:
    names = [
        name
        for name, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p))
        if body.get(name) is not None and body[name] != value
    ]
    for name, value in body.items():
        if name in _READ or name in _HARMLESS or name in _NEVER or value is None:
            continue
        if not any(
            (type(value) is not bool and value == neutral) or value is neutral for neutral in _NEUTRAL.get(name, ())
        ):
            names.append(name if name in _NAMED else "other")
    return tuple(dict.fromkeys(names))


class _ToolChoice(NamedTuple):
    parses_calls: bool
    overridden: tuple[str, ...] = ()


def _tool_choice(body: Mapping[str, Any]) -> _ToolChoice:
    choice = body.get("tool_choice")
    if choice is None or choice == "auto":
        return _ToolChoice(True)
    if choice == "none":
        return _ToolChoice(False)
    if choice == "required" or isinstance(choice, dict):
        return _ToolChoice(True, ("tool_choice",))
    raise _bad("tool_choice", "tool_choice must be auto, none, required or a function")


class _Tools(NamedTuple):
    functions: tuple[dict[str, Any], ...]
    overridden: tuple[str, ...]


def _tools(body: Mapping[str, Any]) -> _Tools:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise _bad("tools", f"tools must be a list of at most {MAX_TOOLS} functions")
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    # A strict tool wants sampling to be constrained to its schema.
    return _Tools(functions, ("strict",) if any(tool["function"].get("strict") for tool in tools) else ())


def _function(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise _bad(where, f"{where} must be a function: {{'type': 'function', 'function': {{...}}}}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise _bad(where, f"{where}.function.parameters must be a JSON schema")
    name, description = _text(function, "name", where=where), _text(function, "description", default="", where=where)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _messages(body: Mapping[str, Any]) -> tuple[RawMessage, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or len(messages) > MAX_MESSAGES:
        raise _bad("messages", f"messages must be a list of 1 to {MAX_MESSAGES} messages")
    names: dict[str, str] = {}
    """Id of a call -> name of its tool."""
    read: list[RawMessage] = []
    for i, message in enumerate(messages):
        one = _message(message, f"messages[{i}]", names)
        names |= {call.id: call.name for call in one.calls}
        read.append(one)
    if (num_parts := sum(len(message.parts) for message in read)) > MAX_PARTS:
        raise _bad("messages", f"messages have {num_parts} texts and images; at most {MAX_PARTS} are allowed")
    if read[-1].role == "assistant":
        raise _bad("messages", "the last message is the assistant's: there is nothing to respond to")
    return tuple(read)


def _message(message: Any, where: str, names: Mapping[str, str]) -> RawMessage:
    if not isinstance(message, dict):
        raise _bad(where, f"{where} must be an object")
    name = message.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise _bad(where, f"{where}.role must be one of {', '.join(_ROLES)}")
    parts = _parts(message.get("content"), f"{where}.content", allows_images=role in ("user", "tool"))
    if role == "assistant":
        if message.get("function_call") is not None:
            raise _bad(where, f"{where}.function_call is not supported: use tool_calls")
        return RawMessage(role, parts, _calls(message.get("tool_calls") or [], f"{where}.tool_calls"))
    if role == "tool":
        call_id = _text(message, "tool_call_id", where=where)
        return RawMessage(role, parts, call_id=call_id, name=names.get(call_id))
    if not parts:
        raise _bad(where, f"{where}.content is missing")
    return RawMessage(role, parts, name=_text(message, "name", default="", where=where) or None)


def _parts(content: Any, where: str, *, allows_images: bool) -> tuple[str | ImageUrl, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (_sound(content),)
    if not isinstance(content, list):
        raise _bad(where, f"{where} must be text or a list of parts")
    return tuple(_part(part, f"{where}[{i}]", allows_images=allows_images) for i, part in enumerate(content))


def _part(part: Any, where: str, *, allows_images: bool) -> str | ImageUrl:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return _text(part, "text", where=where)
    if kind != "image_url" or not allows_images:
        allowed = "text or image_url" if allows_images else "text"
        raise _bad(where, f"{where} must be of type {allowed}")
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not url.startswith("data:"):
        raise _bad(
            where,
            f"{where}: images must be data URLs (data:image/png;base64,...); one that is fetched could be another when "
            "it is trained on",
        )
    return ImageUrl(url)


def _calls(calls: Any, where: str) -> tuple[Call, ...]:
    if not isinstance(calls, list):
        raise _bad(where, f"{where} must be a list")
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _bad(where, f"{where}[{i}] must be a call of a function")
        texts = (_text(call, "id", where=where), _text(function, "name", where=where))
        read.append(Call(*texts, _text(function, "arguments", default="{}", where=where)))
    return tuple(read)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    are_few = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not are_few or not all(isinstance(s, str) and 0 < len(s) <= MAX_WORD_CHARS for s in stops):
        limits = f"at most {MAX_STOPS} texts, each of at most {MAX_WORD_CHARS} characters"
        raise _bad("stop", f"stop must be a text or a list of {limits}")
    return tuple(_sound(text) for text in stops)


def _text(
    body: Mapping[str, Any], name: str, *, default: str | None = None, where: str = "", max_chars: int | None = None
) -> str:
    value = body.get(name)
    value = default if value is None else value
    full = f"{where}.{name}" if where else name
    if not isinstance(value, str):
        raise _bad(where or name, f"{full} must be text")
    if max_chars is not None and len(value) > max_chars:
        raise _bad(where or name, f"{full} has more than {max_chars} characters")
    return _sound(value)


def _sound(text: str) -> str:
    """Replace lone surrogates, which are no text."""
    return text.encode(errors="replace").decode()


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise _bad(name, f"{name} must be true or false")
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, least: int, most: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise _bad(name, f"{name} must be a whole number, {bounds}")
    return value
