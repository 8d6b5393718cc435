"""The model of the step that a run's evaluation liked best, kept apart from the checkpoints, which come and go."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from vlmrl.errors import ConfigError
from vlmrl.observe.atomic import partial, replace
from vlmrl.system.storage import writing
from vlmrl.types import Metrics

_RECORD = "best.json"
_FLAG = "ckpt.best_metric_key"


@dataclass(frozen=True, slots=True)
class Best:
    """What `best.json` in the folder says of the model beside it, so that neither is ever there without the other."""

    metric: str
    value: float
    step: int


def read_best(folder: Path, *, metric: str) -> Best | None:
    """The record of the best model so far; None when there is none.

    Raises ConfigError when it was chosen by another metric, or cannot be read.
    """
    path = folder / _RECORD
    if not path.exists():
        return None
    try:
        best = Best(**json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; delete {folder} to choose anew") from error
    if best.metric != metric:
        raise ConfigError(
            f"{folder} was chosen by {best.metric}, not by {_FLAG} {metric}: set it back, or delete the folder"
        )
    return best


def keep_best(
    folder: Path, metrics: Metrics, *, metric: str, step: int, save: Callable[[Path], None]
) -> tuple[Best, bool]:
    """Make the model of now be `folder` when `metrics` has a higher `metric` than the one that lies there.

    `save` writes the model, as a whole, to a folder that it is given. Of equals the earlier one stays. A run that is
    killed meanwhile leaves the older model; one that goes on from a checkpoint compares with what lies there, of
    whichever step that is. Returns the best of now, and whether it is new.

    Raises ConfigError when the metric was not measured, or is not one of which more is better; StorageError when the
    disk refuses.
    """
    value = _value(metrics, metric)
    best = read_best(folder, metric=metric)
    if best is not None and not value > best.value:
        return best, False
    new = Best(metric=metric, value=value, step=step)
    written = partial(folder)
    save(written)
    with writing(folder.name, folder.parent):
        (written / _RECORD).write_text(json.dumps(asdict(new), indent=1) + "\n")
        replace(folder, by=written)
    return new, True


def _value(metrics: Metrics, metric: str) -> float:
    if not (metric.endswith("/reward") or "/pass@" in metric):
        raise ConfigError(f"{_FLAG} {metric}: more of it is not better; name a pass@k or a reward of an evaluation")
    if metric not in metrics:
        known = sorted(name for name in metrics if name.endswith("/reward") or "/pass@" in name)
        raise ConfigError(f"{_FLAG} {metric} is not what the evaluation measures: {', '.join(known) or 'nothing'}")
    value = metrics[metric]
    # Nothing is better than a number that is none, and it is better than nothing.
    return -math.inf if math.isnan(value) else value
