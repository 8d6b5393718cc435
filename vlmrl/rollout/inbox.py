"""The part of an engine that takes buckets of weights: through memory of its machine, or from GPU to GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError
from vlmrl.models.transfer import Outbox, Ticket
from vlmrl.models.weights import Bucket
from vlmrl.rollout.launch import one_line
from vlmrl.rollout.transfer import Offer

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Inbox:
    """What engines inherit. Buckets come between the two ends of an update, in any order."""

    def __init__(self, name: str, vllm: Vllm) -> None:
        """`name` is the engine's, for messages."""
        self.name = name
        self._vllm = vllm
        self._outbox = Outbox()

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Let the workers meet the learner, which must be coming at the same time (`vllm.sync_backend` nccl or ipc).

        `init_info` holds the fields of vLLM's WeightTransferInitInfo. Raises ClusterError when they do not meet.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        try:
            await self._started().init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        except Exception as error:  # vLLM sends the worker's exception as text, in an exception of its own
            raise ClusterError(
                f"rollout engine {self.name} could not meet the trainer over {self._vllm.sync_backend}: "
                f"{one_line(error)}; vllm.sync_backend shm needs no meeting"
            ) from error

    async def load(self, ticket: Ticket) -> None:
        """Load some of the weights, which lie in memory of this machine until this returns, under Hugging Face's
        parameter names, or under those of PEFT's files.
        """
        self._require_update()
        await self._call("vlmrl_load", ticket)

    async def relay(self, bucket: Bucket, number: int, num_loaded: int) -> Ticket:
        """Lay bucket `number` of the update, which came from another machine, into memory of this one, where all
        engines of it can `load` it. Buckets may overtake one another: Ray calls an engine as arguments arrive.

        They must have loaded the first `num_loaded` buckets of the update: their memory is used again. Raises
        ClusterError when the machine has no memory for it.
        """
        self._require_update()
        self._outbox.release(num_loaded)
        return self._outbox.put_bucket(bucket, number)

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load a bucket that lies in this process alone."""
        await self.load(await self.relay(bucket, 0, 0))
        self._release_all()

    async def receive(self, offer: Offer) -> None:
        """Load some of the weights from GPU to GPU; over nccl the learner must be sending them at the same time."""
        self._require_update()
        await self._call("vlmrl_receive", offer)

    def _release_all(self) -> None:
        """Nobody reads what was relayed any more."""
        self._outbox.begin(keep_bytes=self._vllm.bucket_bytes)

    def _started(self) -> AsyncLLM:
        raise NotImplementedError

    def _require_update(self) -> int:
        raise NotImplementedError

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        raise NotImplementedError
