"""Moving average of the trainable weights, in fp32 on the CPU, swapped into the model when it is saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from vlmrl.errors import ConfigError
from vlmrl.learning.safe_load import safe_load
from vlmrl.models.expert_parallel import is_shared
from vlmrl.models.quantize import true_shape


class Ema:
    """`average <- beta * average + (1 - beta) * weights`, starting at the initial weights (Polyak averaging).

    One per rank, made after the engine has started. Under ZeRO-3 a rank averages its shards of all trainable
    parameters. Otherwise every rank has all parameters and averages some of them: together the ranks hold one copy.
    """

    def __init__(self, net: nn.Module, *, beta: float) -> None:
        self._beta = beta
        self._trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self._owners = _owners(self._trained, torch.distributed.get_world_size())
        rank = torch.distributed.get_rank()
        self._average = {
            name: _held(p).detach().to("cpu", torch.float32, copy=True)
            for name, p in self._trained.items()
            if self._owners.get(name, rank) == rank
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights. Call it after each optimizer step; it is not a collective."""
        for name, average in self._average.items():
            average.lerp_(_held(self._trained[name]).to("cpu", torch.float32), 1.0 - self._beta)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the model's weights by the average within the context, and restore them afterwards, to the last bit.

        A collective. For saving only: no backward pass and no optimizer step may happen within.
        """
        trained: list[Any] = list(self._trained.values())
        kept = [_held(p).detach().to("cpu", copy=True) for p in trained]
        _drop_whole(trained)
        try:
            self._put_average()
            yield
        finally:
            _drop_whole(trained)
            for parameter, weights in zip(trained, kept, strict=True):
                _held(parameter).copy_(weights)

    def state(self) -> dict[str, Tensor]:
        """This rank's averages: fp32 tensors on the CPU by parameter name, flat shards under ZeRO-3."""
        return dict(self._average)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state()` of the same rank. Raises ValueError for the state of another model or number of ranks."""
        expected = {name: average.shape for name, average in self._average.items()}
        given = {name: average.shape for name, average in state.items()}
        if expected != given:
            differ = sorted(name for name in {*expected, *given} if expected.get(name) != given.get(name))
            raise ValueError(f"{len(differ)} tensors of the moving average differ, such as {differ[0]}")
        for name, average in self._average.items():
            average.copy_(state[name])

    def save(self, folder: Path) -> None:
        """Write this rank's averages into an unfinished checkpoint."""
        torch.save(self.state(), _file(folder))

    def load(self, folder: Path) -> None:
        """Restore from a checkpoint. Raises ConfigError when it has no average, or one of another model or number of
        ranks."""
        if not _file(folder).exists():
            raise ConfigError(
                f"{folder} was written without a moving average: leave --train.enable_ema off as it was, "
                f"or give the run another --ckpt.output_dir"
            )
        try:
            self.load_state(safe_load(_file(folder)))
        except ValueError as error:
            raise ConfigError(f"{folder} does not fit this run: {error}; give it another --ckpt.output_dir") from error

    @torch.no_grad()
    def _put_average(self) -> None:
        for name, parameter in self._trained.items():
            held = _held(parameter)
            if name in self._average:
                held.copy_(self._average[name])
            if name in self._owners:
                # In the parameter's own dtype, so that all ranks have the same rounded values.
                torch.distributed.broadcast(held, src=self._owners[name])


def _owners(trained: Mapping[str, nn.Parameter], world_size: int) -> dict[str, int]:
    """Assign each parameter to the rank that averages it, largest first, to the rank with the least so far.

    Shards, and experts that are spread over the ranks, have no owner: each rank averages its own.
    """
    owners: dict[str, int] = {}
    loads = [0] * world_size
    whole = {name: math.prod(true_shape(p)) for name, p in trained.items() if not (hasattr(p, "ds_id") or is_shared(p))}
    for name in sorted(whole, key=lambda name: (-whole[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += whole[name]
    return owners


def _held(parameter: Any) -> Tensor:
    """Return the part of a parameter that this rank stores: its shard under ZeRO-3, else all of it. Writes go to the
    weight."""
    shard: Tensor = parameter.ds_tensor.data if hasattr(parameter, "ds_id") else parameter.data
    return shard


def _drop_whole(parameters: list[Any]) -> None:
    """Drop gathered copies of ZeRO-3 parameters, which would keep the old values.

    DeepSpeed keeps small parameters gathered between passes; it gathers them again in the next pass.
    """
    whole = [p for p in parameters if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.AVAILABLE]
    if whole:
        whole[0].partition(param_list=whole, has_been_updated=False)


def _file(folder: Path) -> Path:
    return folder / f"average_rank_{torch.distributed.get_rank()}.pt"
