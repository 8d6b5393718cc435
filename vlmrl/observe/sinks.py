"""Where a step's numbers go to stay: a file of JSON lines, TensorBoard, Weights & Biases.

Every sink is told the first step that this run will write. A run that continues from a checkpoint makes some steps a
second time, and what a sink already holds of them is dropped, so that no step is in it twice.
"""

from __future__ import annotations

import json
import math
import os
import threading
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmrl.errors import ConfigError
from vlmrl.observe.metrics import check_name
from vlmrl.system.storage import writing
from vlmrl.types import Metrics

if TYPE_CHECKING:
    from vlmrl.config.ckpt import Logger, Wandb

_KEY = "WANDB_API_KEY"


class Sink(Protocol):
    """Keeps numbers by step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """One step's numbers; they survive this process from here on."""

    def close(self) -> None:
        """Nothing more will come."""


def open_sinks(
    logger: Logger, *, metrics: Path, tensorboard: Path, first_step: int, config: Mapping[str, Any]
) -> list[Sink]:
    """The sinks that the settings ask for. `tensorboard` is the folder where `logger.tensorboard_dir` names none.

    W&B shows `config` beside the curves.

    Raises ConfigError when W&B is asked for and cannot be used, and StorageError, like every write, for a full disk.
    """
    # W&B comes first: it is the one that can fail, and then the others must not have dropped anything yet.
    sinks: list[Sink] = []
    if logger.wandb.project is not None:
        sinks.append(WandbSink(logger.wandb, folder=metrics.parent, config=config))
    sinks.append(JsonlSink(metrics, first_step=first_step))
    sinks.append(TensorBoardSink(Path(logger.tensorboard_dir or tensorboard), first_step=first_step))
    return sinks


class JsonlSink:
    """One JSON object per line and step. A number that JSON does not have (NaN, infinity) is written as null."""

    def __init__(self, file: Path, *, first_step: int) -> None:
        self._writing = partial(writing, file.name, file.parent)
        with self._writing():
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.exists():
                kept = [json.dumps(record) + "\n" for record in read_metrics(file) if record["step"] < first_step]
                written = file.with_suffix(".tmp")
                written.write_text("".join(kept), encoding="utf-8")
                written.replace(file)
            self._file = file.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        for name in metrics:
            check_name(name)
        numbers = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        with self._writing():
            self._file.write(json.dumps({"step": step} | numbers) + "\n")
            # What is flushed is the kernel's: a killed process loses nothing of it.
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, by line. A line that was cut off when its run was killed is left out."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


class TensorBoardSink:
    """Event files for TensorBoard, which hides the steps from `first_step` on that an earlier run wrote."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # torch: not before somebody really runs

        self._writing = partial(writing, "TensorBoard's curves", folder)
        if threading.excepthook is not _without_tensorboard:
            threading.excepthook = _without_tensorboard
        with self._writing():
            self._writer = SummaryWriter(os.fspath(folder), purge_step=first_step if first_step > 0 else None)

    def write(self, step: int, metrics: Metrics) -> None:
        with self._writing():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, global_step=step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _without_tensorboard(told: threading.ExceptHookArgs, otherwise: Any = threading.excepthook) -> None:
    """Print no traceback of TensorBoard's writing thread: `TensorBoardSink.write` raises the same error."""
    if type(told.thread).__name__ != "_AsyncWriterThread":
        otherwise(told)


class WandbSink:
    """Weights & Biases. Its id lies in the output folder, so that a continued run continues its curves there too.

    W&B does not take back what it has: of a step that is made a second time it keeps the first numbers.
    """

    def __init__(self, settings: Wandb, *, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises ConfigError when the package or the key is missing, or the server refuses."""
        wandb = usable_wandb()
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.org,
                group=settings.group,
                name=settings.run_name or folder.resolve().name,
                id=_run_id(folder),
                resume="allow",
                dir=os.fspath(folder),
                config=dict(config),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).replace(os.environ.get(_KEY) or "\0", "...").split())
            raise ConfigError(f"logger.wandb: W&B refused the run: {reason}") from None

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def usable_wandb() -> Any:
    """The package wandb. Raises ConfigError when it is missing, or has no key."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "logger.wandb.project is set, but the package wandb is not installed: pip install wandb, or unset it"
        ) from error
    if not os.environ.get(_KEY) and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        raise ConfigError(
            f"logger.wandb.project is set, but the environment variable {_KEY} is not: set it or WANDB_MODE=offline"
        )
    return wandb


def _run_id(folder: Path) -> str:
    file = folder / "wandb_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
