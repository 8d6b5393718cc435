"""Write metrics to a JSON lines file, TensorBoard and Weights & Biases.

A run that resumes from a checkpoint repeats some steps. Each sink gets the first step that this run writes, and drops
what it already holds from that step on, so that no step is in it twice.
"""

from __future__ import annotations

import json
import math
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
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
    """Stores metrics by step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Store one step's metrics; they outlive this process once the call returns."""

    def close(self) -> None:
        """Close the sink."""


def open_sinks(
    logger: Logger, *, metrics: Path, tensorboard: Path, first_step: int, config: Mapping[str, Any]
) -> list[Sink]:
    """Open the configured sinks. `tensorboard` is the folder used when `logger.tensorboard_dir` is not set.

    W&B shows `config` next to the curves.

    Raises:
        ConfigError: W&B is configured and cannot be used.
        StorageError: the disk is full; writes raise it, too.
    """
    # W&B comes first: if it fails, the other sinks must not have dropped any steps yet.
    sinks: list[Sink] = []
    if logger.wandb.project is not None:
        sinks.append(WandbSink(logger.wandb, folder=metrics.parent, config=config))
    sinks.append(JsonlSink(metrics, first_step=first_step))
    sinks.append(TensorBoardSink(Path(logger.tensorboard_dir or tensorboard), first_step=first_step))
    return sinks


class JsonlSink:
    """One JSON object per line and step. NaN and infinity, which JSON does not have, are written as null.

    Further metrics of the newest step join its record: those of an evaluation after the last step, or of one that a
    stop interrupted and the resumed run makes.
    """

    def __init__(self, file: Path, *, first_step: int) -> None:
        self._path = file
        self._newest: dict[str, Any] = {}
        """The last record of the file."""
        self._writing = partial(writing, file.name, file.parent)
        with self._writing():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._begin([record for record in self._records() if record["step"] < first_step])

    def write(self, step: int, metrics: Metrics) -> None:
        for name in metrics:
            check_name(name)
        numbers = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        with self._writing():
            if step == self._newest.get("step"):
                earlier = [record for record in self._records() if record["step"] != step]
                before = self._file
                self._begin([*earlier, _joined(self._newest, numbers)])
                before.close()
                return
            self._newest = {"step": step} | numbers
            self._file.write(json.dumps(self._newest) + "\n")
            # Flushed to the kernel, so that a killed process loses nothing.
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _records(self) -> list[dict[str, Any]]:
        return read_metrics(self._path) if self._path.exists() else []

    def _begin(self, records: Sequence[dict[str, Any]]) -> None:
        """Replace the file by one with these records, to which further ones are appended."""
        written = self._path.with_suffix(".tmp")
        written.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        written.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._newest = dict(records[-1]) if records else {}


def _joined(record: Mapping[str, Any], numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the record of a step with further metrics, which replace older values; times add up."""
    times = {name for name in numbers if name.startswith("time/") and record.get(name) is not None}
    return {**record, **numbers} | {name: record[name] + (numbers[name] or 0.0) for name in times}


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, one per line. A line cut off by a killed run is skipped."""
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
    """Event files for TensorBoard, which hides an earlier run's steps from `first_step` on."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports torch, so only when a run begins

        self._writing = partial(writing, "TensorBoard's curves", folder)
        if threading.excepthook is not _excepthook:
            threading.excepthook = _excepthook
        with self._writing():
            self._writer = SummaryWriter(os.fspath(folder), purge_step=first_step if first_step > 0 else None)

    def write(self, step: int, metrics: Metrics) -> None:
        with self._writing():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, global_step=step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _excepthook(hook_args: threading.ExceptHookArgs, default_hook: Any = threading.excepthook) -> None:
    """Suppress the traceback of TensorBoard's writer thread: `TensorBoardSink.write` raises the same error."""
    if type(hook_args.thread).__name__ != "_AsyncWriterThread":
        default_hook(hook_args)


class WandbSink:
    """Weights & Biases. The run id is kept in the output folder, so that a resumed run continues the same W&B run.

    W&B cannot replace logged steps: for a repeated step it keeps the first values.
    """

    def __init__(self, settings: Wandb, *, folder: Path, config: Mapping[str, Any]) -> None:
        """Start or resume the run. Raises ConfigError when package or key are missing, or W&B refuses the run."""
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
    """Import wandb. Raises ConfigError when the package or its key is missing."""
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
