"""Chat templates in conversations of several turns: text behind a response, tools, history that is rewritten."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import BridgeReport

Message = dict[str, Any]
"""{"role": ..., "content": list of {"type": "text", "text": ...} and {"type": "image"}}. A content that is one string
is inserted as it is; text in a list is escaped."""
Tool = Mapping[str, Any]
"""A function in OpenAI's format: {"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON
schema}}."""
Apply = Callable[[Sequence[Message], Sequence[Tool], bool], str]
"""Apply the template to messages and tools, with or without the beginning of a response.

Raises DataError if the template rejects them.
"""

# Unicode noncharacters: no template and no valid text contains them.
_RESPONSE, _THOUGHT, _FEEDBACK = "\ufdd2response\ufdd2", "\ufdd2thought\ufdd2", "\ufdd2feedback\ufdd2"
_QUESTION: Message = {"role": "user", "content": "A question."}
_PROBE: Tool = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probed": {"type": "integer"}}, "required": ["probed"]},
    },
}

_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Qwen's system prompt for tools, in Hermes' format (github.com/NousResearch/Hermes-Function-Calling)."""
_CALL = "<tool_call>\n{}\n</tool_call>"
_ONLY_IMAGES = "(see the image below)"
"""Text of a tool's result that is an image, where the template takes images in user messages only."""


class ChatTemplate:
    """The chat template of a model, in conversations whose responses are never rendered again."""

    def __init__(self, apply: Apply, *, image_text: str | None) -> None:
        """`image_text` is the placeholder of an image; None for a model without images."""
        self._apply = apply
        self._image_text = image_text

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Render the first prompt. Tools that the template does not show are in the system prompt.

        Raises:
            ConfigError: the template shows tools, but not in this prompt.
        """
        if tools and not self.report.shows_tools:
            return self._apply(with_tools(messages, tools, system=self.report.has_system_role), (), True)
        text = self._apply(messages, tools, True)
        for tool in tools:
            if tool["function"]["name"] not in text:
                raise ConfigError(
                    f"the model's chat template does not show the tool {tool['function']['name']} in this prompt"
                )
        return text

    def after_response(self, messages: Sequence[Message]) -> str:
        """Render what follows a response: its end of turn, the messages, and the beginning of the next response."""
        _, response, tail = self._apply(
            [_QUESTION, _response(_RESPONSE), *self._adapted(messages)], (), True
        ).partition(_RESPONSE)
        if not response:
            raise DataError("the model's chat template drops a response that these messages follow")
        return tail

    def history(self, responses: Sequence[str], feedback: Sequence[Sequence[Message]]) -> str:
        """Render all that follows the first prompt, without the beginning of a response with which it ends.

        `feedback[k]` follows `responses[k]`. The text begins with `beginning` where the template keeps it in history.
        """
        messages = [_QUESTION]
        for response, follows in zip(responses, feedback, strict=True):
            messages += [_response(response), *self._adapted(follows)]
        question = self._apply([_QUESTION], (), False)
        text = self._apply(messages, (), True)
        if not text.startswith(question):
            raise DataError("the model's chat template changes the first prompt when the conversation goes on")
        return text.removeprefix(question)

    def as_taken(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of a conversation in the form that the template takes, as `after_response` does.

        Tool calls of assistant messages become text where the template shows no tools.
        """
        taken: list[Message] = []
        for is_feedback, run in groupby(messages, key=lambda message: message["role"] in ("user", "tool")):
            members = list(run)
            taken += self._adapted(members) if is_feedback else [self._with_calls(message) for message in members]
        return taken

    def _with_calls(self, message: Message) -> Message:
        if not message.get("tool_calls") or self.report.shows_tools:
            return message
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [_CALL.format(json.dumps(call["function"], ensure_ascii=False)) for call in message["tool_calls"]]
        texts = [part for part in message["content"] if part["type"] == "text" and part["text"]]
        text = "\n".join([*(part["text"] for part in texts), *calls])
        return others | {"content": [{"type": "text", "text": text}]}

    @cached_property
    def beginning(self) -> str:
        """The beginning of a response, with which a prompt ends: `<|im_start|>assistant` and a line break."""
        question, prompt = self._apply([_QUESTION], (), False), self._apply([_QUESTION], (), True)
        return prompt.removeprefix(question) if prompt.startswith(question) else ""

    @cached_property
    def report(self) -> BridgeReport:
        """What the template does, from renderings of short conversations.

        Raises:
            ConfigError: it cannot render a response that a user message follows.
        """
        prompt = self._apply([_QUESTION], (), True)
        try:
            plain = self._apply([_QUESTION, _response(_RESPONSE), _feedback("user")], (), True)
        except DataError as error:
            raise ConfigError(f"agents need a chat template that takes several turns, but {error}") from error
        tail = plain.partition(_RESPONSE)[2]
        if plain.count(_RESPONSE) != 1 or tail.count(_FEEDBACK) != 1:
            raise ConfigError(
                "agents need a chat template that shows every response and every user message once: that of the model "
                "does not"
            )
        shows_tools = self._shows_tools()
        has_tool_role = shows_tools and self._takes_results()
        return BridgeReport(
            shows_tools=shows_tools,
            has_system_role=self._has_system_role(),
            has_tool_role=has_tool_role,
            images_in_tool_role=has_tool_role and self._takes_images_in_results(),
            rewrites_history=self._rewriting(prompt, plain),
            history_problem=self._history_problem(has_tool_role),
        )

    def _rewriting(self, prompt: str, plain: str) -> str | None:
        thinking = f"{_THOUGHT}\n</think>\n\n{_RESPONSE}"
        if not prompt.rstrip().endswith("<think>"):
            thinking = f"<think>\n{thinking}"
        thoughtful = self._apply([_QUESTION, _response(thinking), _feedback("user")], (), True)
        if _THOUGHT not in thoughtful:
            return "removes the thinking of earlier responses"
        if not plain.startswith(prompt + _RESPONSE) or not thoughtful.startswith(prompt + thinking):
            return "renders earlier responses differently from how they were sampled"
        return None

    def _history_problem(self, has_tool_role: bool) -> str | None:
        question = self._apply([_QUESTION], (), False)
        if not self._apply([_QUESTION], (), True).startswith(question):
            return "it changes the first prompt where a response begins"
        for role in ("user", "tool") if has_tool_role else ("user",):
            messages = [_QUESTION, *[_response(_RESPONSE), _feedback(role)] * 2]
            try:
                text = self._apply(messages, (), True)
            except DataError as error:
                return str(error)
            if not text.startswith(question):
                return "it changes the first prompt when the conversation goes on"
        return None

    def _shows_tools(self) -> bool:
        try:
            text = self._apply([_QUESTION], [_PROBE], True)
        except DataError:
            return False
        return "probe_of_tools" in text and "probed" in text

    def _has_system_role(self) -> bool:
        try:
            return _FEEDBACK in self._apply([_feedback("system"), _QUESTION], (), True)
        except DataError:
            return False

    def _takes_results(self) -> bool:
        """Whether two messages of the role `tool` may follow a response."""
        try:
            text = self._apply([_QUESTION, _response(_RESPONSE), _feedback("tool"), _feedback("tool")], (), True)
        except DataError:
            return False
        return text.count(_RESPONSE) == 1 and text.partition(_RESPONSE)[2].count(_FEEDBACK) == 2

    def _takes_images_in_results(self) -> bool:
        if self._image_text is None:
            return False
        image = _feedback("tool") | {"content": [{"type": "image"}, {"type": "text", "text": "A picture."}]}
        try:
            text = self._apply([_QUESTION, _response(_RESPONSE), image], (), True)
        except DataError:
            return False
        return text.count(self._image_text) == 1

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the roles that the template takes, in an order that keeps that of the images.

        Results of tools become user messages where there is no role for them, and their images where that role takes
        none. Neighbouring user messages become one, because many templates want the roles to alternate.
        """
        adapted: list[Message] = []
        images: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] != "tool":
                adapted.append({"role": "user", "content": [*images, *message["content"]]})
                images = []
            elif not self.report.has_tool_role:
                adapted.append({"role": "user", "content": _wrapped(message["content"])})
            elif self.report.images_in_tool_role:
                adapted.append(message)
            else:
                images += [part for part in message["content"] if part["type"] == "image"]
                adapted.append(message | {"content": _text_of_result(message["content"])})
        if images:
            adapted.append({"role": "user", "content": images})
        return _merged(adapted)


def with_tools(messages: Sequence[Message], tools: Sequence[Tool], *, system: bool) -> list[Message]:
    """Return the messages with the tools in the system message, or in the first message if there is no such role."""
    text = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *others = messages
    if first["role"] == "system":
        return [first | {"content": [*first["content"], {"type": "text", "text": f"\n\n{text}"}]}, *others]
    if system:
        return [{"role": "system", "content": [{"type": "text", "text": text}]}, *messages]
    return [first | {"content": [{"type": "text", "text": f"{text}\n\n"}, *first["content"]]}, *others]


def _response(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _feedback(role: str) -> Message:
    message: Message = {"role": role, "content": _FEEDBACK}
    # Mistral's templates refuse an id of any other form than nine letters and digits.
    return message | {"name": "probe_of_tools", "tool_call_id": "probe0000"} if role == "tool" else message


def _wrapped(content: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    before, after = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>"))
    return [before, *content, after]


def _text_of_result(content: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [part for part in content if part["type"] == "text" and part["text"]]
    return texts or [{"type": "text", "text": _ONLY_IMAGES if content else ""}]


def _merged(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] == "user":
            content = [*merged[-1]["content"], {"type": "text", "text": "\n"}, *message["content"]]
            merged[-1] = merged[-1] | {"content": content}
        else:
            merged.append(message)
    return merged
