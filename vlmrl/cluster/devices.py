"""GPUs that each node may use, by their names in CUDA_VISIBLE_DEVICES there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vlmrl.errors import ClusterError

_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")
_TIMEOUT_S = 60.0


def gpu_names(visible: str | None, count: int, *, where: str) -> tuple[str, ...]:
    """Return the names of the first `count` visible GPUs.

    A name is a number, the id of a GPU (`GPU-...`) or of a part of one (`MIG-...`). CUDA ignores the list from the
    first malformed name on, and so does this.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES; None if it is not set.
        where: the node, for messages.

    Raises:
        ClusterError: fewer are visible, or one is listed twice.
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
    duplicate = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if duplicate is not None:
        raise ClusterError(
            f"CUDA_VISIBLE_DEVICES of {where} lists {duplicate} twice ({visible!r}), which would make two slots of one "
            "GPU: correct it, then restart Ray"
        )
    if len(names) < count:
        raise ClusterError(
            f"Ray counts {count} GPUs on {where}, but CUDA_VISIBLE_DEVICES there shows {len(names)} of them "
            f"({visible!r}): correct it, then restart Ray"
        )
    return tuple(names[:count])


def visible_gpus(addresses: Mapping[str, str]) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of each node when Ray was started there; None if it was not set.

    Args:
        addresses: Ray's id of a node -> its address.

    Raises:
        ClusterError: a node does not respond.
    """
    if not addresses:
        return {}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def visible_devices() -> str | None:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES")

    # Otherwise Ray may hide the GPUs from a task that requests none.
    unhidden = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    refs = {
        node: ray.remote(visible_devices)
        .options(
            num_cpus=0,
            runtime_env=unhidden,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        .remote()
        for node in addresses
    }
    visible: dict[str, str | None] = {}
    for node, ref in refs.items():
        try:
            visible[node] = ray.get(ref, timeout=_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"node {addresses[node]} does not report its GPUs "
                f"({type(error).__name__}): restart Ray there, or remove the node"
            ) from error
    return visible
