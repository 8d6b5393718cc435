"""Responses in OpenAI's format, with the types of the `openai` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vlmrl.agents.gateway.bodies import ChatBody, RefusedError
from vlmrl.agents.gateway.tree import Node
from vlmrl.plugins import Processor
from vlmrl.types import FinishReason

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A response, and why it ended."""

    node: Node
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The responses to a request."""

    id: str
    created: int
    """Seconds since 1970."""
    version: int
    """The oldest version of the weights that sampled it."""
    num_prompt_tokens: int
    choices: tuple[Choice, ...]

    def mark_delivered(self) -> None:
        """Note that the client has the responses."""
        for choice in self.choices:
            choice.node.is_delivered = True


def as_completion(completion: Completion, body: ChatBody, processor: Processor) -> ChatCompletion:
    """Return a whole response."""
    from openai.types.chat import ChatCompletion

    num_sampled = sum(len(choice.node.tokens) for choice in completion.choices)
    return ChatCompletion.model_validate(
        {
            **_head(completion, body, "chat.completion"),
            "choices": [
                {
                    "index": i,
                    "finish_reason": _finish(choice),
                    "logprobs": _logprobs(choice.node, processor) if body.logprobs else None,
                    "message": {
                        "role": "assistant",
                        "content": choice.node.reply.text or (None if choice.node.reply.calls else ""),
                        **({"tool_calls": _calls(choice.node)} if choice.node.reply.calls else {}),
                    },
                }
                for i, choice in enumerate(completion.choices)
            ],
            "usage": _usage(completion.num_prompt_tokens, num_sampled),
        }
    )


def first_chunk(body: ChatBody, completion_id: str, created: int) -> str:
    """Return the first event of a stream, before anything is sampled."""
    head = {"id": completion_id, "created": created, "object": "chat.completion.chunk", "model": body.model}
    delta = {"role": "assistant", "content": ""}
    return _event(head | {"choices": [{"index": i, "delta": delta, "finish_reason": None} for i in range(body.n)]})


def chunks(completion: Completion, body: ChatBody, processor: Processor) -> Iterator[str]:
    """Yield the events of a stream behind the first."""
    head = _head(completion, body, "chat.completion.chunk")
    for i, choice in enumerate(completion.choices):
        reply = choice.node.reply
        logprobs = _logprobs(choice.node, processor) if body.logprobs else None
        if reply.text or logprobs is not None:
            delta: dict[str, Any] = {"content": reply.text}
            yield _event(head | {"choices": [_delta(i, delta) | {"logprobs": logprobs}]})
        for number, call in enumerate(_calls(choice.node)):
            yield _event(head | {"choices": [_delta(i, {"tool_calls": [{"index": number} | call]})]})
        yield _event(head | {"choices": [_delta(i, {}, _finish(choice))]})
    if body.include_usage:
        num_sampled = sum(len(choice.node.tokens) for choice in completion.choices)
        yield _event(head | {"choices": [], "usage": _usage(completion.num_prompt_tokens, num_sampled)})


DONE = "data: [DONE]\n\n"
"""The last event of a stream."""
WAITING = ": waiting\n\n"
"""A comment, which clients skip."""


def error_event(error: RefusedError) -> str:
    """Return the event of an error, where the stream has begun already."""
    return f"data: {json.dumps(as_error(error))}\n\n"


def as_error(error: RefusedError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, default)
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _head(
    completion: Completion, body: ChatBody, kind: Literal["chat.completion", "chat.completion.chunk"]
) -> dict[str, Any]:
    fingerprint = f"version-{completion.version}"
    return {
        "id": completion.id,
        "created": completion.created,
        "object": kind,
        "model": body.model,
        "system_fingerprint": fingerprint,
    }


def _event(chunk: dict[str, Any]) -> str:
    from openai.types.chat import ChatCompletionChunk

    return f"data: {ChatCompletionChunk.model_validate(chunk).model_dump_json(exclude_unset=True)}\n\n"


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}


def _finish(choice: Choice) -> str:
    return "tool_calls" if choice.node.reply.calls else choice.finish_reason


def _calls(node: Node) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in node.reply.calls
    ]


def _usage(num_prompt_tokens: int, num_sampled: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }


def _logprobs(node: Node, processor: Processor) -> dict[str, Any]:
    content = []
    for token, logprob in zip(node.tokens.tolist(), node.logprobs.tolist(), strict=True):
        text = str(processor.tokenizer.decode([token], skip_special_tokens=False))
        # JSON has no infinity; OpenAI's smallest value stands for it.
        content.append(
            {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode()), "top_logprobs": []}
        )
    return {"content": content, "refusal": None}
