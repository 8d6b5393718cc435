"""Load checkpoint files, DeepSpeed's included, without running code that they may contain."""

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
"""All classes that DeepSpeed writes besides tensors and plain values, at every stage, precision and optimizer. Their
constructors have no side effects."""

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""The refused name in the error message of torch's unpickler."""


class SafeCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine with a loader that creates nothing but tensors, plain values and `CLASSES`.

    DeepSpeed's own loader unpickles, so that a file can run arbitrary code.
    """

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file. Raises ConfigError if it holds anything else."""
        return safe_load(Path(path), map_location=map_location, classes=CLASSES)


def use_safe_load(engine: Any) -> None:
    """Make a DeepSpeed engine load checkpoints through `SafeCheckpointEngine`."""
    engine.checkpoint_engine = SafeCheckpointEngine(engine._config)


def safe_load(
    file: Path, *, map_location: str | torch.device | Callable[..., Any] | None = "cpu", classes: tuple[type, ...] = ()
) -> Any:
    """Load what `torch.save` wrote into `file`: tensors, plain values and objects of `classes`.

    Raises ConfigError when the file holds anything else, whose loading could run code.
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
            "arbitrary code: the file was changed, so resume from a checkpoint that you trust"
        ) from None
