"""Write metrics to a JSON lines file and TensorBoard. `vlmrl.observe.trackers` has the services.

A run that resumes from a checkpoint repeats some steps. Each sink gets the first step that this run writes, and drops
what it already holds from that step on, so that no step is in it twice.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlmrl.observe.metrics import check_name
from vlmrl.observe.samples import Sample
from vlmrl.system.storage import writing
from vlmrl.types import Metrics

if TYPE_CHECKING:
    from vlmrl.config.ckpt import Logger

_MAX_PIXELS = 512
"""Longest side of an image that is written to TensorBoard."""


class Sink(Protocol):
    """Stores metrics by step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Store one step's metrics; they outlive this process once the call returns."""

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        """Store some responses of a step; `name` is `train`, or `eval/` with an evaluation set."""

    def close(self) -> None:
        """Close the sink."""


def open_sinks(logger: Logger, *, metrics: Path, tensorboard: Path, first_step: int) -> list[Sink]:
    """Open the files. `tensorboard` is the folder used when `logger.tensorboard_dir` is not set.

    Raises:
        StorageError: the disk is full; writes raise it, too.
    """
    return [
        JsonlSink(metrics, first_step=first_step),
        TensorBoardSink(Path(logger.tensorboard_dir or tensorboard), first_step=first_step),
    ]


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

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        """Store nothing: `rollouts/` has all responses."""

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
    """Return the records of a metrics file, one per line. Lines that a killed run or a disk has damaged are skipped."""
    records = []
    for line in file.read_bytes().splitlines():
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):  # cut off, or not UTF-8
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

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        with self._writing():
            self._writer.add_text(f"samples/{name}", "\n\n".join(map(_text, samples)), global_step=step)
            pictures = dict.fromkeys(path for sample in samples for path in sample.images)
            for number, path in enumerate(pictures):
                self._writer.add_image(f"samples/{name}/{number}", _pixels(path), global_step=step, dataformats="HWC")
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _text(sample: Sample) -> str:
    """A sample in Markdown; a block that is indented by four spaces is code, in which nothing is markup."""
    numbers = f"score {sample.score}, advantage {sample.advantage}, {sample.tokens} tokens"
    blocks = (("prompt", sample.prompt), ("label", sample.label), ("response", sample.response))
    code = "\n\n".join(
        f"{title}:\n\n" + "\n".join(f"    {line}" for line in text.splitlines()) for title, text in blocks
    )
    return f"{numbers}\n\n{code}\n\n---"


def _pixels(path: Path) -> NDArray[np.uint8]:
    """The image of a file as [height, width, 3], scaled down."""
    with Image.open(path) as image:
        small = image.convert("RGB")
    small.thumbnail((_MAX_PIXELS, _MAX_PIXELS))
    return np.asarray(small)


def _excepthook(hook_args: threading.ExceptHookArgs, default_hook: Any = threading.excepthook) -> None:
    """Suppress the traceback of TensorBoard's writer thread: `TensorBoardSink.write` raises the same error."""
    if type(hook_args.thread).__name__ != "_AsyncWriterThread":
        default_hook(hook_args)
