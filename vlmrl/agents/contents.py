"""Text and images of environments on their way into a conversation: measured first, then stored and tokenized."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from vlmrl.agents.environments import Observation
from vlmrl.agents.observations import MAX_CHARS
from vlmrl.config.data import Columns
from vlmrl.data.media import InlineMedia, make_row_media
from vlmrl.errors import ConfigError
from vlmrl.plugins import Processor
from vlmrl.types import Media, Pixels

T = TypeVar("T")

LONG_CHARS = 4_000
"""Most characters that are tokenized in the event loop, within milliseconds. More would delay all other episodes."""


class Contents:
    """Converts the text and images of environments.

    Args:
        context_len: tokens of a conversation.
        share: stores an image, and returns the handle that the trainer reads.
    """

    def __init__(
        self, processor: Processor, *, columns: Columns, context_len: int, share: Callable[[InlineMedia], Media]
    ) -> None:
        self._processor, self._columns, self._share = processor, columns, share
        # No token stands for more characters. The longest are special tokens, which leaves room for normalization.
        longest = max(map(len, processor.tokenizer.get_vocab()))
        self._max_chars = min(MAX_CHARS, context_len * longest)

    def count_images(self, observation: Observation) -> int:
        """Return the number of images of an observation. Raises ConfigError if the model takes text only."""
        if observation.num_images and self._processor.resize_factor is None:
            raise ConfigError(
                "train.agent_func_path: the environment returned an image, but the model takes text only: choose a "
                "vision-language model, or an environment without images"
            )
        return observation.num_images

    async def to_parts(self, observation: Observation) -> list[str | Media]:
        """Resize and store the images of an observation. Raises DataError if one cannot be used."""
        pixels = [part for part in observation.parts if not isinstance(part, str)]
        media = iter(await asyncio.to_thread(self._store, pixels) if pixels else [])
        return [part if isinstance(part, str) else next(media) for part in observation.parts]

    def may_fit(self, num_chars: int) -> bool:
        """Whether so many characters may be few enough tokens for a conversation: if not, nobody need count them."""
        return num_chars <= self._max_chars

    async def tokenize(self, num_chars: int, function: Callable[[Processor], T]) -> T:
        """Call a function that tokenizes so many characters, with the processor that it may use.

        Long texts are tokenized in a thread, in their order.
        """
        if num_chars <= LONG_CHARS:
            return function(self._processor)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, self._copy)

    def _store(self, pixels: Sequence[Pixels]) -> list[Media]:
        images = make_row_media(pixels, processor=self._processor, columns=self._columns)
        return [self._share(image) for image in images]

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="vlmrl-tokenizer")

    @cached_property
    def _copy(self) -> Processor:
        """The thread's own: calls of a tokenizer set and reset whether text that looks like a special token is one."""
        return copy.deepcopy(self._processor)
