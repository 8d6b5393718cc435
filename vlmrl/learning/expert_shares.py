"""Spread a model's experts over the ranks: groups of ranks, and what DeepSpeed must know of the parameters.

DeepSpeed calls it expert parallelism too. Its AutoEP replaces the layers by its own, under other names and for some
families; here the layers stay Transformers', and only DeepSpeed's reduction, sharding and optimizer of such parameters
are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import nn

from vlmrl.errors import ConfigError
from vlmrl.learning.safe_load import safe_load
from vlmrl.models.expert_parallel import (
    ExpertGroup,
    check_expert_parallel,
    expert_layers,
    is_shared,
    share_experts,
)


@cache
def expert_group(size: int) -> ExpertGroup:
    """Join the group of `size` consecutive ranks that share experts. The first call is a collective.

    Models in the same process share the group. `size` divides the number of ranks.
    """
    groups._create_expert_and_data_parallel(size)
    handle = groups._get_expert_parallel_group(_name(size))
    return ExpertGroup(handle, torch.distributed.get_rank(group=handle), size)


def spread_experts(net: nn.Module, size: int) -> None:
    """Leave each rank its share of the model's experts, if it has any. A collective.

    Under ZeRO-3 the shares are sharded over the ranks that hold the same experts. At most one parameter is whole at a
    time. Raises ConfigError when `size` does not divide the experts.
    """
    check_expert_parallel(net, size)
    group = expert_group(size)
    for module in expert_layers(net):
        own = dict(module.named_parameters(recurse=False))
        share_experts(module, group, {name: _share(parameter, group) for name, parameter in own.items()})


def optimizer_keys(parameter: nn.Parameter) -> dict[str, Any]:
    """Keys of the parameter's group in the optimizer, by which DeepSpeed knows who reduces its gradient."""
    return {"moe": True, "name": parameter.group_name} if is_shared(parameter) else {}  # type: ignore[attr-defined]


@contextmanager
def marked(module: nn.Module) -> Iterator[None]:
    """Context in which DeepSpeed starts an engine around `module` and sees that parts of it are experts.

    It looks for modules of its own types.
    """
    if not any(is_shared(parameter) for parameter in module.parameters()):
        yield
        return
    module.add_module("_expert_mark", _Mark())
    try:
        yield
    finally:
        del module._expert_mark


def save_shares(net: nn.Module, folder: Path) -> None:
    """Write the experts of each rank of a group into an unfinished checkpoint.

    DeepSpeed writes the weights of the first rank only. Does nothing under ZeRO-3, where it writes every rank's shards.
    """
    shares = _whole_shares(net)
    if shares and torch.distributed.get_rank() == _group(shares).rank:
        torch.save({name: parameter.data for name, parameter in shares.items()}, _file(folder, shares))


def load_shares(net: nn.Module, folder: Path) -> None:
    """Restore what `save_shares` wrote. Raises ConfigError when a file is missing."""
    shares = _whole_shares(net)
    if not shares:
        return
    file = _file(folder, shares)
    if not file.exists():
        raise ConfigError(f"{file} is missing: delete {folder} and resume from an older checkpoint")
    saved = safe_load(file)
    with torch.no_grad():
        for name, parameter in shares.items():
            parameter.copy_(saved[name])


class _Mark(AutoEPMoELayer):
    """A layer of DeepSpeed's expert parallelism without content."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Do nothing: the groups exist."""


def _share(parameter: Any, group: ExpertGroup) -> nn.Parameter:
    is_sharded = hasattr(parameter, "ds_id")
    with deepspeed.zero.GatheredParameters([parameter], enabled=is_sharded):
        number = parameter.shape[0] // group.size
        own = parameter.data[group.rank * number : (group.rank + 1) * number].clone()
    share: Any = nn.Parameter(own, requires_grad=parameter.requires_grad)
    # DeepSpeed's names: who reduces the gradient, and over whom ZeRO-3 shards.
    share.allreduce = False
    share.group_name = share.ds_zero_partition_group_name = _name(group.size)
    share.ds_zero_placement_family = "autoep_expert"
    if is_sharded:
        share.ds_zero_partition_process_group = groups._get_expert_data_parallel_group(_name(group.size))
        parameter.convert_to_zero_parameters(param_list=[share])
    result: nn.Parameter = share
    return result


def _whole_shares(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the experts that this rank holds in whole, not as shards of ZeRO-3."""
    return {name: p for name, p in net.named_parameters() if is_shared(p) and not hasattr(p, "ds_id")}


def _group(shares: dict[str, nn.Parameter]) -> ExpertGroup:
    group: ExpertGroup = next(iter(shares.values())).expert_group  # type: ignore[attr-defined]
    return group


def _file(folder: Path, shares: dict[str, nn.Parameter]) -> Path:
    return folder / f"experts_rank_{_group(shares).rank}.pt"


def _name(size: int) -> str:
    return f"ep_size_{size}"
