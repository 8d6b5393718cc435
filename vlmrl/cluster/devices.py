"""Which GPUs each node may use, by the names that CUDA_VISIBLE_DEVICES has for them there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vlmrl.errors import ClusterError

_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")
_LOOK_S = 60.0


def gpu_names(visible: str | None, count: int, *, where: str) -> tuple[str, ...]:
    """The names of the first `count` GPUs that a process sees whose CUDA_VISIBLE_DEVICES is `visible` (None: not set).

    A name is a number, the id of a GPU (`GPU-...`) or of a part of one (`MIG-...`). CUDA reads the list up to the first
    name that it cannot be, and so does this.

    Raises:
        ClusterError: fewer are visible, or one is twice. `where` is the node, for the message.
    """
    if count == 0:
        return ()
    if visible is None:
        return tuple(map(str, range(count)))
    names: list[str] = []
    for name in visible.split(","):
        if not _NAME.fullmatch(name.strip()):
            break
        names.append(name.strip())
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ClusterError(
            f"CUDA_VISIBLE_DEVICES of {where} names {twice} twice ({visible!r}), which makes two slots of one GPU: "
            "correct it, then start Ray again"
        )
    if len(names) < count:
        raise ClusterError(
            f"{where} has {count} GPUs, says Ray, but CUDA_VISIBLE_DEVICES there shows {len(names)} of them "
            f"({visible!r}): correct it, then start Ray again"
        )
    return tuple(names[:count])


def visible_gpus(addresses: Mapping[str, str]) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of each node as it was when Ray started there; None where it is not set.

    Args:
        addresses: Ray's id of a node -> its address.

    Raises:
        ClusterError: a node does not answer.
    """
    if not addresses:
        return {}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look() -> str | None:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES")

    # Without it Ray may hide the GPUs from a task that has asked for none.
    shown = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    asked = {
        node: ray.remote(look)
        .options(
            num_cpus=0,
            runtime_env=shown,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        .remote()
        for node in addresses
    }
    found: dict[str, str | None] = {}
    for node, answer in asked.items():
        try:
            found[node] = ray.get(answer, timeout=_LOOK_S)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"node {addresses[node]} does not say which GPUs it may use "
                f"({type(error).__name__}): restart Ray there, or leave the node out"
            ) from error
    return found
