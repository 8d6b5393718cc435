"""The optimizer's state sleeps but for updates, and only where it is to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

from vlmrl.config.ds import Ds
from vlmrl.learning.base import Learner


class Engine:
    """DeepSpeed's, as far as it sleeps."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def offload_states(self, include: tuple[State, ...]) -> None:
        self.log.append(set(include))

    def reload_states(self) -> None:
        self.log.append("reload")


def learner(ds: Ds, device: str) -> tuple[Learner, list[Any]]:
    made, engine = Learner.__new__(Learner), Engine()
    made._ds, made._device, made._engine = ds, torch.device(device), engine
    return made, engine.log


def test_what_only_a_step_reads_comes_for_the_step_and_goes_again() -> None:
    made, log = learner(Ds(enable_sleep=True), "cuda")
    with made._optimizer_awake():
        log.append("step")
    # The weights of passes and weight syncs stay.
    assert log == ["reload", "step", {State.hp_params, State.optim_states}]


@pytest.mark.parametrize(("ds", "device"), [(Ds(enable_sleep=True), "cpu"), (Ds(), "cuda")])
def test_on_cpu_and_unless_asked_for_nothing_moves(ds: Ds, device: str) -> None:
    made, log = learner(ds, device)
    with made._optimizer_awake():
        pass
    assert log == []
