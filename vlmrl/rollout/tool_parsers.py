"""vLLM's parsers of tool calls, by the format that a chat template asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vlmrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO = "auto"
DEFAULT = "hermes"

# How a chat template that shows tools asks for calls. The first that it has decides.
_FORMATS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜DSML｜", "deepseek_v32"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("<arg_key>", "glm47"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("ipython", "llama3_json"),
)


class RawCall(NamedTuple):
    """A tool call as the parser returns it."""

    name: str
    arguments: str
    """JSON."""
    id: str
    """The model's own, or a random one of vLLM."""


def tool_format(setting: str, chat_template: str | None, *, shows_tools: bool) -> str:
    """Return the name of vLLM's parser: the setting, or for `auto` the one of the format that the chat template shows.

    Templates that show no tools get them in the system prompt, in Hermes' format.
    """
    if setting != AUTO:
        return setting
    if not shows_tools or chat_template is None:
        return DEFAULT
    return next((name for mark, name in _FORMATS if mark in chat_template), DEFAULT)


def vllm_tool_parser(
    name: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]
) -> Callable[[str], list[RawCall]]:
    """Return vLLM's parser of this name. `tools` are functions in OpenAI's format.

    It takes the text of a response without its end token, and returns no call where vLLM finds none. It may raise
    anything for text that is no call.

    Raises:
        ConfigError: vLLM has no such parser, or it does not fit the tokenizer.
    """
    # vLLM logs a traceback for every call that it cannot parse, and an untrained policy writes many.
    for module in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(module).setLevel(logging.CRITICAL + 1)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    names = sorted({*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers})
    if name not in names:
        raise ConfigError(f"agent.tool_format {name}: vLLM has no such parser; there are: {AUTO}, {', '.join(names)}")
    request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=[dict(tool) for tool in tools])
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    except Exception as error:  # each parser looks for its own tokens in the vocabulary
        raise ConfigError(f"agent.tool_format {name} does not fit the model's tokenizer: {error}") from error

    def calls(text: str) -> list[RawCall]:
        extracted = parser.extract_tool_calls(text, request)
        if not extracted.tools_called:
            return []
        return [RawCall(call.function.name, call.function.arguments, call.id) for call in extracted.tool_calls]

    return calls
