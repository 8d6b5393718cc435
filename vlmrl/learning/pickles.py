"""Reads DeepSpeed's checkpoint files without running code that somebody put into them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from vlmrl.errors import ConfigError

CLASSES: tuple[type, ...] = (LossScaler, ZeroStageEnum, fragment_address)
"""All that DeepSpeed writes beside tensors and plain values, whatever the stage, precision and optimizer. None of them
does anything when it is made."""

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""The name in the message of torch's unpickler for what it does not import."""


class WeightsOnly(TorchCheckpointEngine):
    """DeepSpeed's own way to write checkpoint files, with a reader that makes nothing but tensors, plain values and
    `CLASSES`. DeepSpeed's reader unpickles, so that a file can run whatever it wants to."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file. Raises ConfigError for one that holds anything else."""
        return read(Path(path), map_location=map_location, classes=CLASSES)


def guard(engine: Any) -> None:
    """Have a DeepSpeed engine load checkpoints by `WeightsOnly`."""
    engine.checkpoint_engine = WeightsOnly(engine._config)


def read(
    file: Path, *, map_location: str | torch.device | Callable[..., Any] | None = "cpu", classes: tuple[type, ...] = ()
) -> Any:
    """What `torch.save` wrote into `file`: tensors, plain values and objects of `classes`.

    Raises ConfigError when the file holds anything else, which loading would run.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        refused = _REFUSED.search(str(error))
        if refused is None:  # damaged
            raise
        raise ConfigError(
            f"{file} holds a Python object that no checkpoint of vlmrl has ({refused[1]}), and loading it could run "
            "anything: somebody has changed the file, so continue from a checkpoint that you trust"
        ) from None
