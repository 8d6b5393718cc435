"""Keeps a request's images with it until it ends, so that vLLM can begin it again.

vLLM leaves the pixels behind when a request begins whose image lies in the prefix cache, since nobody will look at
them. But a request that is put aside (its KV cache was needed, or new weights made it worthless) begins anew without
that cache, and then the pixels are missing: "Expected number of multimodal embeddings to match number of input items",
and the engine is dead. Seen in vLLM 0.32, whose scheduler hands a resumed request's features to the workers once only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlmrl.system.lifeline import Lifeline


class KeptImages(Lifeline):
    """A lifeline that also sees to this where it arrives: in the engine core, before that has scheduled anything."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, super().__reduce__()


def _unpickle(arrive: Callable[..., Lifeline], arguments: tuple[Any, ...]) -> Lifeline:
    arrive(*arguments)
    keep_images()
    return KeptImages()


def keep_images() -> None:
    """From now on the scheduler of this process hands every request on with its images. Idempotent."""
    from vllm.v1.core.sched import output

    assert hasattr(output, "strip_covered_mm_data"), "vLLM has another way of leaving pixels behind"
    output.strip_covered_mm_data = _whole


def _whole(mm_features: list[Any], num_computed_tokens: int, uses_mrope: bool = False) -> list[Any]:
    return mm_features
