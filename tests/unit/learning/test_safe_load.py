"""Loading a file restores what DeepSpeed wrote, and runs no code. Real checkpoints: test_optimizers_ranks.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from vlmrl.errors import ConfigError
from vlmrl.learning.optimizers import _BITSANDBYTES
from vlmrl.learning.safe_load import CLASSES, safe_load


class Payload:
    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self._marker, "w")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("classes", [(), CLASSES], ids=["plain", "deepspeed"])
def test_code_in_a_file_is_refused_in_one_line_and_does_not_run(
    tmp_path: Path, is_zip: bool, classes: tuple[type, ...]
) -> None:
    file, marker = tmp_path / "state.pt", tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": Payload(marker)}, file, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        ConfigError, match=r"holds a Python object .*open.*resume from a checkpoint that you trust"
    ) as e:
        safe_load(file, classes=classes)
    assert str(file) in str(e.value)
    assert "\n" not in str(e.value)
    assert not marker.exists()


def test_objects_that_deepspeed_writes_are_loaded(tmp_path: Path) -> None:
    scaler = LossScaler(scale=4)
    written = {
        "loss_scaler": scaler,
        "zero_stage": ZeroStageEnum.gradients,
        "param_slice_mappings": [{"w": fragment_address(numel=6, start=3)}],
        "step": torch.tensor(2.0),
    }
    torch.save(written, tmp_path / "state.pt")
    loaded = safe_load(tmp_path / "state.pt", classes=CLASSES)
    assert type(loaded["loss_scaler"]) is LossScaler
    assert loaded["loss_scaler"].cur_scale == 4
    assert loaded["zero_stage"] is ZeroStageEnum.gradients
    assert loaded["param_slice_mappings"] == [{"w": fragment_address(numel=6, start=3)}]
    with pytest.raises(ConfigError):
        safe_load(tmp_path / "state.pt")


@pytest.mark.parametrize("name", _BITSANDBYTES.values())
def test_the_state_of_every_optimizer_of_bitsandbytes_is_tensors_and_plain_values(tmp_path: Path, name: str) -> None:
    import bitsandbytes

    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = getattr(bitsandbytes.optim, name)([weight], lr=1e-3)
    weight.grad = torch.ones_like(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    state = optimizer.state_dict()
    for tensors in state["state"].values():  # as in CUDA's paged memory
        for tensor in tensors["__bnb_optimizer_quant_state__"].values():
            tensor.is_paged, tensor.page_deviceid = True, 0
    torch.save(state, tmp_path / "state.pt")
    loaded = safe_load(tmp_path / "state.pt")
    assert loaded["state"][0]["step"] == 1
    assert loaded["state"][0].keys() == state["state"][0].keys()
