"""The part of an engine that takes buckets of weights: from memory of its machine, or from another machine."""

from __future__ import annotations

from typing import Any

from vlmrl.models.transfer import Outbox, Ticket
from vlmrl.models.weights import Bucket


class Inbox:
    """What engines inherit. Buckets come between the two ends of an update, in any order."""

    def __init__(self, *, keep_bytes: int) -> None:
        """So much memory of each relayed bucket is kept for the next update."""
        self._outbox = Outbox()
        self._keep_bytes = keep_bytes

    async def load(self, ticket: Ticket) -> None:
        """Load some of the weights, which lie in memory of this machine until this returns, under Hugging Face's
        parameter names, or under those of PEFT's files.
        """
        self._require_update()
        await self._call("vlmrl_load", ticket)

    async def relay(self, bucket: Bucket, num_loaded: int) -> Ticket:
        """Lay a bucket that came from another machine into memory of this one, where all engines of it can `load` it.

        They must have loaded the first `num_loaded` buckets of the update: their memory is used again. Raises
        ClusterError when the machine has no memory for it.
        """
        self._require_update()
        self._outbox.release(num_loaded)
        return self._outbox.put_bucket(bucket)

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load a bucket that lies in this process alone."""
        await self.load(await self.relay(bucket, 0))
        self._release_all()

    def _release_all(self) -> None:
        """Nobody reads what was relayed any more."""
        self._outbox.begin(keep_bytes=self._keep_bytes)

    def _require_update(self) -> int:
        raise NotImplementedError

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        raise NotImplementedError
