"""The part of an engine that receives buckets of weights, through shared memory or from GPU to GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, DiedError
from vlmrl.models.shared_memory import Outbox, Ticket
from vlmrl.models.weight_buckets import Bucket
from vlmrl.rollout.gpu_transfer import Offer
from vlmrl.rollout.launch import one_line

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


_Result = TypeVar("_Result")

_LOOK_S = 0.5
"""Interval at which a call that waits for the engine core looks whether it lives."""


class Inbox:
    """Base class of engines. Buckets arrive between start and end of an update, in any order."""

    def __init__(self, name: str, vllm: Vllm) -> None:
        """`name` is the engine's, for messages."""
        self.name = name
        self._vllm = vllm
        self._outbox = Outbox()

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Connect the workers to the trainer, which must connect at the same time (`vllm.sync_backend` nccl or ipc).

        Args:
            init_info: the fields of vLLM's WeightTransferInitInfo.

        Raises:
            ClusterError: the connection fails.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        try:
            await self._core(
                self._started().init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
            )
        except DiedError:
            raise
        except Exception as error:  # vLLM sends the worker's exception as text
            raise ClusterError(
                f"rollout engine {self.name} could not connect to the trainer over {self._vllm.sync_backend}: "
                f"{one_line(error)}; vllm.sync_backend shm needs no connection"
            ) from error

    async def load(self, ticket: Ticket) -> None:
        """Load a bucket from this machine's shared memory, where it must stay until this returns.

        Its tensors have Hugging Face's parameter names, or those of PEFT's files.
        """
        self._require_update()
        await self._call("vlmrl_load", ticket)

    async def relay(self, bucket: Bucket, number: int, num_loaded: int) -> Ticket:
        """Copy bucket `number` of the update from another machine into this one's shared memory, where all its engines
        can `load` it. Buckets may overtake each other: Ray calls an engine as arguments arrive.

        All engines here must have loaded the first `num_loaded` buckets of the update: their memory is reused.

        Raises:
            ClusterError: the machine has no memory left for it.
        """
        self._require_update()
        self._outbox.release(num_loaded)
        return self._outbox.put_bucket(bucket, number)

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load a bucket of this process."""
        await self.load(await self.relay(bucket, 0, 0))
        self._release_all()

    async def receive(self, offer: Offer) -> None:
        """Load a bucket from GPU to GPU; over nccl the trainer must send it at the same time."""
        self._require_update()
        await self._call("vlmrl_receive", offer)

    async def _core(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        """Await a call of vLLM's engine core. If the core dies meanwhile, vLLM would let the call wait forever.

        Raises:
            DiedError: the core has died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                if self._started().errored:
                    raise await self._death()
            return task.result()
        except EngineDeadError as error:
            raise await self._death() from error
        finally:
            task.cancel()

    def _release_all(self) -> None:
        """Free the memory of relayed buckets, which are no longer read."""
        self._outbox.begin(keep_bytes=self._vllm.bucket_bytes)

    def _started(self) -> AsyncLLM:
        raise NotImplementedError

    def _require_update(self) -> int:
        raise NotImplementedError

    async def _death(self) -> DiedError:
        raise NotImplementedError

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        raise NotImplementedError
