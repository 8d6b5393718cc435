"""The images of an episode's requests: clients send those of a history with every request, and each is decoded once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vlmrl.agents.gateway.bodies import RawMessage
from vlmrl.agents.gateway.chat import ChatInput
from vlmrl.agents.gateway.serving import Serving
from vlmrl.data.media import make_row_media
from vlmrl.types import Media


class Decoded(NamedTuple):
    """Messages whose images have been decoded."""

    messages: list[ChatInput]
    images: dict[bytes, Media]
    """Those that were not known, by the digest of their URL."""


class Images:
    """Images by the digest of their URL."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._known: dict[bytes, Media] = {}

    async def decode(self, messages: Sequence[RawMessage]) -> Decoded:
        """Decode the images of messages. `keep` them once the request is accepted. Raises DataError."""
        urls = [part for message in messages for part in message.parts if not isinstance(part, str)]
        digests = {part: hashlib.blake2b(part.url.encode(), digest_size=16).digest() for part in urls}
        new = {digest: part.url for part, digest in digests.items() if digest not in self._known}
        images: dict[bytes, Media] = {}
        if new:
            images = dict(zip(new, await asyncio.to_thread(self._store, list(new.values())), strict=True))
        media = self._known | images
        decoded = [
            ChatInput(
                message.role,
                tuple(part if isinstance(part, str) else media[digests[part]] for part in message.parts),
                message.calls,
                message.call_id,
                message.name,
            )
            for message in messages
        ]
        return Decoded(decoded, images)

    def keep(self, images: Mapping[bytes, Media]) -> None:
        """Know these images from now on."""
        self._known.update(images)

    @property
    def num_bytes(self) -> int:
        """Memory of their pixels."""
        return sum(3 * item.size[0] * item.size[1] for item in self._known.values())

    def _store(self, urls: Sequence[str]) -> list[Media]:
        images = make_row_media(urls, processor=self._serving.processor, columns=self._serving.columns)
        return [self._serving.share(image) for image in images]
