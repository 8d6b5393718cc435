"""All that the episodes of an engine share behind the gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vlmrl.agents.contents import Contents
from vlmrl.agents.course import Sampler
from vlmrl.agents.gateway.chat import Tools
from vlmrl.agents.tool_calls import ToolCallParser
from vlmrl.config.data import Columns
from vlmrl.config.gateway import Gateway
from vlmrl.data.media import InlineMedia
from vlmrl.plugins import Processor
from vlmrl.types import Media

ParserOf = Callable[[Tools], ToolCallParser]
"""Make the parser of calls of these tools. Raises ConfigError for tools that cannot be parsed."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """All that the episodes of an engine share."""

    gateway: Gateway
    processor: Processor
    columns: Columns
    sample: Sampler
    share: Callable[[InlineMedia], Media]
    """Stores an image, and returns the handle that the trainer reads."""
    parser_of: ParserOf
    context_len: int
    """Tokens of a conversation."""
    max_images: int
    """Images of a conversation."""
    max_turns: int
    """Responses of an episode."""

    @cached_property
    def contents(self) -> Contents:
        """Measures and tokenizes what clients send."""
        return Contents(self.processor, columns=self.columns, context_len=self.context_len, share=self.share)
