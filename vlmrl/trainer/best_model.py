"""The best model of a run by an evaluation metric, kept apart from the checkpoints, which are pruned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from vlmrl.errors import ConfigError
from vlmrl.system.atomic_folders import partial, replace
from vlmrl.system.storage import writing
from vlmrl.types import Metrics

_RECORD = "best.json"
_FLAG = "ckpt.best_metric_key"


@dataclass(frozen=True, slots=True)
class Best:
    """The contents of `best.json`, which is written together with the model, in the same folder."""

    metric: str
    value: float
    step: int


def read_best(folder: Path, *, metric: str) -> Best | None:
    """Read the record of the best model so far; None when there is none.

    Raises ConfigError when the model was chosen by another metric, or the record cannot be read.
    """
    path = folder / _RECORD
    if not path.exists():
        return None
    try:
        best = Best(**json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; delete {folder} to choose again") from error
    if best.metric != metric:
        raise ConfigError(
            f"{folder} was chosen by {best.metric}, not by {_FLAG} {metric}: set it back, or delete the folder"
        )
    return best


def keep_best(
    folder: Path, metrics: Metrics, *, metric: str, step: int, save: Callable[[Path], None]
) -> tuple[Best, bool]:
    """Replace the model in `folder` by the current one if `metrics` has a better value of `metric`: a lower loss, or a
    higher value of any other.

    On a tie the earlier model stays. The folder is replaced in one step: a run that is killed meanwhile leaves the
    older model. A resumed run compares with the existing model, even if it is from a later step.

    Args:
        save: writes the whole model to a folder.

    Returns the record of the best model, and whether it is new.

    Raises ConfigError when the metric was not measured, or does not say which of two models is better; StorageError
    when the model cannot be written.
    """
    value = _value(metrics, metric)
    best = read_best(folder, metric=metric)
    if best is not None and not (value < best.value if _is_loss(metric) else value > best.value):
        return best, False
    new = Best(metric=metric, value=value, step=step)
    written = partial(folder)
    save(written)
    with writing(folder.name, folder.parent):
        (written / _RECORD).write_text(json.dumps(asdict(new), indent=1) + "\n")
        replace(folder, by=written)
    return new, True


def _value(metrics: Metrics, metric: str) -> float:
    if not _orders_models(metric):
        raise ConfigError(
            f"{_FLAG} {metric} does not say which of two models is better; name a pass@k, a reward, an accuracy or a "
            "loss of an evaluation"
        )
    if metric not in metrics:
        available = sorted(filter(_orders_models, metrics))
        raise ConfigError(
            f"{_FLAG} {metric} is not measured by the evaluation, which has: {', '.join(available) or 'none'}"
        )
    value = metrics[metric]
    # Any number is better than NaN, and NaN is better than no model at all.
    worst = math.inf if _is_loss(metric) else -math.inf
    return worst if math.isnan(value) else value


def _orders_models(metric: str) -> bool:
    return _is_loss(metric) or metric.endswith(("/reward", "/accuracy")) or "/pass@" in metric


def _is_loss(metric: str) -> bool:
    return metric.endswith("/loss")
