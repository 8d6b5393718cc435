"""Parsers of tool calls for a model, by the format that its chat template asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from vlmrl.agents.gateway.chat import Tools
from vlmrl.agents.gateway.serving import ParserOf
from vlmrl.agents.tool_calls import ToolCallParser
from vlmrl.plugins import Processor
from vlmrl.rollout.tool_parsers import tool_format, vllm_tool_parser

_NUM_KEPT = 64
"""Sets of tools whose parsers are kept."""


def call_parser(processor: Processor, functions: Sequence[Mapping[str, Any]], setting: str) -> ToolCallParser:
    """Return the parser of calls of these functions, in OpenAI's format. `setting` is `agent.tool_format`.

    Raises:
        ConfigError: vLLM has no such parser, or it does not fit the tokenizer.
    """
    template = processor.tokenizer.chat_template
    shows_tools = processor.check_bridge().shows_tools
    name = tool_format(setting, template if isinstance(template, str) else None, shows_tools=shows_tools)
    return ToolCallParser(processor, vllm_tool_parser(name, processor.tokenizer, functions), name)


def parsers(processor: Processor, setting: str) -> ParserOf:
    """Return what makes parsers of the tools of requests, and keeps the last ones."""

    @lru_cache(maxsize=_NUM_KEPT)
    def parser_of(tools: Tools) -> ToolCallParser:
        return call_parser(processor, tools.functions, setting)

    return parser_of
