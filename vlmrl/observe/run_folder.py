"""Layout of a run's output folder, and checks that it holds no other run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlmrl.config.dump import HEADER
from vlmrl.errors import ConfigError
from vlmrl.observe.sinks import read_metrics


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths under `ckpt.output_dir`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def parameters(self) -> Path:
        """Trainable and total parameters per part of the model."""
        return self.root / "parameters.tsv"

    @property
    def curves(self) -> Path:
        return self.root / "curves.png"

    @property
    def report(self) -> Path:
        """The run to look at, as one page."""
        return self.root / "report.html"

    @property
    def facts(self) -> Path:
        """Steps, placement, versions and end of the run, for its report."""
        return self.root / "facts.json"

    @property
    def reference(self) -> Path:
        """Log-probs of the rows under the reference, with `dpo.precompute_reference`."""
        return self.root / "reference.jsonl"

    @property
    def log(self) -> Path:
        """Output of Ray and other libraries."""
        return self.root / "logs" / "run.log"

    @property
    def reward_log(self) -> Path:
        """Output of reward functions."""
        return self.root / "logs" / "rewards.log"

    @property
    def agent_log(self) -> Path:
        """Output of environments."""
        return self.root / "logs" / "agents.log"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def responses(self) -> Path:
        """All responses of batch generation so far."""
        return self.root / "responses.journal"

    @property
    def outputs(self) -> Path:
        """The files of rows that batch generation has written, a path per line."""
        return self.root / "outputs.txt"

    @property
    def merged(self) -> Path:
        """The model with its adapter, while a run that does not train samples from it."""
        return self.root / ".merged"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The final adapter of a run that trains adapters, instead of `model`."""
        return self.root / "adapter"

    def average(self, *, has_adapter: bool) -> Path:
        """Return the moving average of the trained weights, next to `model` or `adapter`."""
        return self.root / ("adapter_ema" if has_adapter else "model_ema")

    @property
    def best(self) -> Path:
        """The best model or adapter by `ckpt.best_metric_key`, kept when checkpoints are deleted."""
        return self.root / "best"

    @property
    def critic(self) -> Path:
        """The final critic."""
        return self.root / "critic"

    @property
    def models(self) -> tuple[Path, ...]:
        """All paths at which a run may save a model."""
        averages = (self.average(has_adapter=False), self.average(has_adapter=True))
        return (self.model, self.adapter, *averages, self.best, self.critic)

    @property
    def critic_checkpoints(self) -> Path:
        """The critic's part of each checkpoint."""
        return self.checkpoints / "critic"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def check(self, *, resume: bool, has_checkpoint: bool, learns: bool = True) -> None:
        """Check that this run may write here. Writes nothing.

        A run that ended before its first step or first checkpoint has no results and may be started again. A run that
        `learns` leaves models and checkpoints, and can be resumed.

        Raises:
            ConfigError: the folder holds another run or files that a run did not write and this one would replace, or
                there is nothing to resume.
        """
        try:
            exists = self.root.exists()
        except PermissionError as error:
            raise ConfigError(
                f"ckpt.output_dir {self.root}: {error.strerror}: choose a folder that you can access"
            ) from error
        if exists and not self.root.is_dir():
            raise ConfigError(f"ckpt.output_dir {self.root} is a file: choose another folder")
        if resume and not has_checkpoint and (self.model.exists() or self.adapter.exists()):
            raise ConfigError(
                f"ckpt.load_enable is set, but {self.root} holds a finished run without checkpoints: "
                f"choose another --ckpt.output_dir"
            )
        is_run = self.config.exists() or self.metrics.exists()
        if not resume and is_run and (has_checkpoint or self._holds_results):
            hint = "resume it with --ckpt.load_enable, or " if learns else ""
            raise ConfigError(f"ckpt.output_dir {self.root} holds another run: {hint}choose another --ckpt.output_dir")
        foreign = self._foreign_file(has_checkpoint=has_checkpoint and not resume, learns=learns and not is_run)
        if foreign is not None:
            raise ConfigError(
                f"ckpt.output_dir {self.root}: {foreign.name} there was not written by a run, and this one would "
                "replace it: choose another --ckpt.output_dir"
            )

    def _foreign_file(self, *, has_checkpoint: bool, learns: bool) -> Path | None:
        """Return a path that a run would write but a user made: settings, or a model to start from."""
        if self.config.is_file() and not self.config.read_bytes().startswith(HEADER.encode()):
            return self.config
        if not learns:
            return None
        return self.checkpoints if has_checkpoint else next((model for model in self.models if model.exists()), None)

    @property
    def _holds_results(self) -> bool:
        """Whether the folder holds a model, a training step, or the result of an evaluation run."""
        if any(model.exists() for model in self.models) or any(self.rollouts.glob("step_*")):
            return True
        if not self.metrics.exists():
            return False
        if not self.config.exists():  # metrics of unknown origin
            return True
        # Without parameters.tsv it is an evaluation run. A training run's evaluation at step 0 can be repeated.
        steps = [record["step"] for record in read_metrics(self.metrics)]
        return any(step > 0 for step in steps) or (bool(steps) and not self.parameters.exists())

    def open(self) -> None:
        """Make the folder, accessible to this user only. An existing one keeps its mode, since it may be shared.

        Raises:
            ConfigError: the folder cannot be made.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"ckpt.output_dir {self.root} cannot be made: {error.strerror}") from error
