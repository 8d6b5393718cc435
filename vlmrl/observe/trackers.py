"""Experiment trackers: Weights & Biases, MLflow, Trackio, SwanLab. Their packages are imported only when they are used.

A tracker cannot take back what it has. So a resumed run sends only what the tracker does not have yet: of a repeated
step it keeps the first values.
"""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from vlmrl.errors import ConfigError
from vlmrl.observe.facts import RunEnd
from vlmrl.observe.samples import COLUMNS, Sample
from vlmrl.observe.sent import Sent
from vlmrl.types import Metrics

if TYPE_CHECKING:
    from vlmrl.config.ckpt import Logger
    from vlmrl.config.trackers import Mlflow, Swanlab, Trackio, Wandb


class Tracker(Protocol):
    """Takes metrics and samples of steps, in any order of steps."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Send metrics of a step; they are finite."""

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        """Send responses; `name` is `train`, or `eval/` with an evaluation set."""

    def close(self, end: RunEnd) -> None:
        """Send the rest, and mark the run with its end."""


class Service(NamedTuple):
    """What a tracker needs of the machine."""

    setting: str
    """The setting that turns it on."""
    package: str
    pip_name: str
    key: str = ""
    """The environment variable with its key, if it has one."""
    mode: str = ""
    """The environment variable that makes it work without a network, and so without a key."""


class Opening(NamedTuple):
    """The run that a tracker is opened for."""

    folder: Path
    """The run's, whose name is the default name in the tracker. Ids for a resume are kept there."""
    config: Mapping[str, Any]
    """All settings, which the tracker shows."""
    resumes: bool
    """The run continues an earlier one."""

    def name(self, given: str | None) -> str:
        return given or self.folder.resolve().name

    def id(self, file: str) -> str:
        """Return the id of the run, which its resumes keep."""
        path = self.folder / file
        if not (self.resumes and path.exists()):
            path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()


class WandbTracker:
    """Weights & Biases. The run id is kept in the output folder, so that a resumed run continues the same W&B run.

    The horizontal axis is the metric `step`: W&B's own step only grows, and drops what comes later for an earlier step,
    such as the evaluation that a stop had interrupted.
    """

    service: ClassVar = Service("logger.wandb.project", "wandb", "wandb", "WANDB_API_KEY", "WANDB_MODE")

    def __init__(self, settings: Wandb, opening: Opening) -> None:
        self._wandb = _imported(self.service)
        self._run = self._wandb.init(
            project=settings.project,
            entity=settings.org,
            group=settings.group,
            name=opening.name(settings.run_name),
            id=opening.id("wandb_id"),
            resume="allow",
            dir=os.fspath(opening.folder),
            config=dict(opening.config),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log({**metrics, "step": step})

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        # A column for each image: W&B does not store images that are in a list.
        num_images = max((len(sample.images) for sample in samples), default=0)
        table = self._wandb.Table(columns=["step", *COLUMNS[:-1], *(f"image {n}" for n in range(1, num_images + 1))])
        for sample in samples:
            images = [self._wandb.Image(os.fspath(path)) for path in sample.images]
            table.add_data(step, *sample[:-1], *images, *[None] * (num_images - len(images)))
        paths = dict.fromkeys(path for sample in samples for path in sample.images)
        pictures = [self._wandb.Image(os.fspath(path)) for path in paths]
        self._run.log({f"samples/{name}": table, f"samples/{name}/images": pictures, "step": step})

    def close(self, end: RunEnd) -> None:
        self._run.finish(exit_code=0 if end == "finished" else 1)


class MlflowTracker:
    """MLflow. The run id is kept in the output folder. Metrics are sent in the background."""

    service: ClassVar = Service("logger.mlflow.experiment", "mlflow", "mlflow")

    def __init__(self, settings: Mlflow, opening: Opening) -> None:
        self._mlflow = _imported(self.service)
        # A client of its own: the global active run belongs to the user's functions, if to anyone.
        self._client = self._mlflow.MlflowClient()
        file = opening.folder / "mlflow_id"
        if opening.resumes and file.exists():
            self._id = file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(settings.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
        self._id = self._client.create_run(number, run_name=opening.name(settings.run_name)).info.run_id
        file.write_text(f"{self._id}\n", encoding="utf-8")
        self._client.log_dict(self._id, dict(opening.config), "config.json")

    def write(self, step: int, metrics: Metrics) -> None:
        entities, now = self._mlflow.entities, self._mlflow.utils.time.get_current_time_millis()
        # MLflow takes no `@` in a name: pass@1 becomes pass_1.
        rows = [entities.Metric(re.sub(r"[^\w.:/-]", "_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows, synchronous=False)

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        columns = {column: [sample[i] for sample in samples] for i, column in enumerate(COLUMNS[:-1])}
        columns["images"] = [" ".join(path.name for path in sample.images) for sample in samples]
        self._client.log_dict(self._id, columns, f"samples/{name}_step_{step:06d}.json")
        for path in dict.fromkeys(path for sample in samples for path in sample.images):
            self._client.log_artifact(self._id, os.fspath(path), "samples/images")

    def close(self, end: RunEnd) -> None:
        self._mlflow.flush_async_logging()
        states = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, status=states[end])


class TrackioTracker:
    """Trackio. A resumed run continues the run of its name."""

    service: ClassVar = Service("logger.trackio.project", "trackio", "trackio")

    def __init__(self, settings: Trackio, opening: Opening) -> None:
        self._trackio = _imported(self.service)
        self._run = self._trackio.init(
            project=settings.project,
            name=opening.name(settings.run_name),
            config=dict(opening.config),
            resume="allow" if opening.resumes else "never",
            embed=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        rows = []
        for sample in samples:
            # Its tables show strings as Markdown.
            texts = [_as_code(value) if isinstance(value, str) else value for value in sample[:-1]]
            rows.append([*texts, [self._trackio.Image(os.fspath(path)) for path in sample.images]])
        self._run.log({f"samples/{name}": self._trackio.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def close(self, end: RunEnd) -> None:
        self._run.finish()  # it knows no other end


class SwanlabTracker:
    """SwanLab. The run id is kept in the output folder; SwanLab resumes online runs only."""

    service: ClassVar = Service("logger.swanlab.project", "swanlab", "swanlab", "SWANLAB_API_KEY", "SWANLAB_MODE")

    def __init__(self, settings: Swanlab, opening: Opening) -> None:
        self._swanlab = _imported(self.service)
        mode = os.environ.get(self.service.mode, "online")
        online = {"id": opening.id("swanlab_id"), "resume": "allow"} if mode == "online" else {}
        self._run = self._swanlab.init(
            project=settings.project,
            workspace=settings.org,
            name=opening.name(settings.run_name),
            log_dir=os.fspath(opening.folder / "swanlog"),
            config=dict(opening.config),
            mode=mode,
            **online,
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        texts = [self._swanlab.Text(_as_text(sample)) for sample in samples]
        paths = dict.fromkeys(path for sample in samples for path in sample.images)
        images = [self._swanlab.Image(os.fspath(path)) for path in paths]
        self._run.log({f"samples/{name}": texts} | ({f"samples/{name}/images": images} if images else {}), step=step)

    def close(self, end: RunEnd) -> None:
        if end == "finished":
            self._run.finish()
        else:
            self._run.finish(state="aborted" if end == "stopped" else "crashed", error=f"the run {end}")


class OnlyNew:
    """Passes on what the tracker does not have: metrics that no earlier process of the run has sent, and finite."""

    def __init__(self, tracker: Tracker, sent: Sent) -> None:
        self.tracker = tracker
        self._sent = sent

    def write(self, step: int, metrics: Metrics) -> None:
        sent = self._sent.earlier(step)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        new = {} if sent is None else {name: value for name, value in finite.items() if name not in sent}
        if new:
            self.tracker.write(step, new)
            self._sent.note(step, new)

    def write_samples(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        mark = "reward/mean" if name == "train" else f"{name}/"
        sent = self._sent.earlier(step)
        if sent is not None and not any(metric.startswith(mark) for metric in sent):
            self.tracker.write_samples(step, name, samples)

    def close(self, end: RunEnd) -> None:
        self.tracker.close(end)


def check_trackers(logger: Logger) -> None:
    """Check that packages and keys of the configured trackers are there. Raises ConfigError."""
    for kind, _ in _configured(logger):
        _imported(kind.service)


def open_trackers(logger: Logger, opening: Opening) -> list[OnlyNew]:
    """Open the configured trackers.

    Raises:
        ConfigError: a package or key is missing, or a tracker refuses the run.
    """
    trackers = []
    for kind, settings in _configured(logger):
        _imported(kind.service)
        try:
            tracker = kind(settings, opening)
        except Exception as error:  # each package has errors of its own: no network, no such project, a wrong key
            section = kind.service.setting.rpartition(".")[0]
            reason = str(error).replace(os.environ.get(kind.service.key) or "\0", "...")
            raise ConfigError(
                f"{section}: {kind.service.package} refused the run: {' '.join(reason.split())}"
            ) from None
        sent = Sent(opening.folder / f"{kind.service.package}_sent.json", resumes=opening.resumes)
        trackers.append(OnlyNew(tracker, sent))
    return trackers


def _configured(logger: Logger) -> list[tuple[Any, Any]]:
    """Return class and settings of each tracker that is turned on."""
    choices = (
        (WandbTracker, logger.wandb, logger.wandb.project),
        (MlflowTracker, logger.mlflow, logger.mlflow.experiment),
        (TrackioTracker, logger.trackio, logger.trackio.project),
        (SwanlabTracker, logger.swanlab, logger.swanlab.project),
    )
    return [(kind, settings) for kind, settings, switch in choices if switch is not None]


def _imported(service: Service) -> Any:
    """Import the package. Raises ConfigError when it or its key is missing."""
    try:
        package = import_module(service.package)
    except ImportError as error:
        raise ConfigError(
            f"{service.setting} is set, but the package {service.package} is not installed: "
            f"pip install {service.pip_name}, or unset it"
        ) from error
    works_offline = os.environ.get(service.mode) in ("offline", "local", "disabled") if service.mode else True
    if service.key and not os.environ.get(service.key) and not works_offline:
        raise ConfigError(
            f"{service.setting} is set, but the environment variable {service.key} is not: set it or "
            f"{service.mode}=offline"
        )
    return package


def _as_code(text: str) -> str:
    """Return text as a code block of Markdown, in which nothing is markup."""
    fence = "`" * max(3, max((len(run) + 1 for run in re.findall(r"`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _as_text(sample: Sample) -> str:
    numbers = f"score {sample.score}, advantage {sample.advantage}, {sample.tokens} tokens, label {sample.label}"
    return f"{numbers}\n\nprompt:\n{sample.prompt}\n\nresponse:\n{sample.response}"
