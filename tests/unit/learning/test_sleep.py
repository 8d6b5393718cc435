"""The optimizer's state is offloaded between updates, if the settings say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

from vlmrl.config.ds import Ds
from vlmrl.learning.base import TrainableModel


class Engine:
    """DeepSpeed's offloading methods."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def offload_states(self, include: tuple[State, ...]) -> None:
        self.log.append(set(include))

    def reload_states(self) -> None:
        self.log.append("reload")


def model(ds: Ds, device: str) -> tuple[TrainableModel, list[Any]]:
    made, engine = TrainableModel.__new__(TrainableModel), Engine()
    made._ds, made._device, made._engine = ds, torch.device(device), engine
    return made, engine.log


def test_optimizer_state_is_on_the_device_for_the_update_only() -> None:
    made, log = model(Ds(enable_sleep=True), "cuda")
    with made._optimizer_awake():
        log.append("step")
    # The weights, which passes and weight syncs need, stay.
    assert log == ["reload", "step", {State.hp_params, State.optim_states}]


@pytest.mark.parametrize(("ds", "device"), [(Ds(enable_sleep=True), "cpu"), (Ds(), "cuda")])
def test_nothing_is_offloaded_on_cpu_or_without_the_setting(ds: Ds, device: str) -> None:
    made, log = model(ds, device)
    with made._optimizer_awake():
        pass
    assert log == []
