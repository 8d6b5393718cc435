"""The output folder of a run: what lies where, and that two runs never mix in one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlmrl.errors import ConfigError
from vlmrl.observe.sinks import read_metrics

_DUMPED = b"# vlmrl "
"""How `config.dump` begins a file."""


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
        """What trains and what is frozen."""
        return self.root / "parameters.tsv"

    @property
    def curves(self) -> Path:
        return self.root / "curves.png"

    @property
    def log(self) -> Path:
        """What Ray and the libraries wrote that is not for people."""
        return self.root / "logs" / "run.log"

    @property
    def reward_log(self) -> Path:
        """What reward functions print."""
        return self.root / "logs" / "rewards.log"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """What a run that trains adapters leaves instead of `model`."""
        return self.root / "adapter"

    def average(self, *, has_adapter: bool) -> Path:
        """The moving average of what trains, beside `model` or `adapter`."""
        return self.root / ("adapter_ema" if has_adapter else "model_ema")

    @property
    def best(self) -> Path:
        """The model, or adapter, that is best by `ckpt.best_metric_key`, whatever becomes of the checkpoints."""
        return self.root / "best"

    @property
    def critic(self) -> Path:
        """The final critic."""
        return self.root / "critic"

    @property
    def models(self) -> tuple[Path, ...]:
        """Every model that a run may leave."""
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
        """Whether this run may write here, without writing anything.

        A run that was killed before its first checkpoint has nothing to continue from and nothing to lose, and one that
        ended before its first step may be started again. One that `learns` leaves models and checkpoints, and can be
        continued.

        Raises:
            ConfigError: the folder holds another run or what no run has written and this one would replace, or there
                is nothing to continue.
        """
        try:
            is_there = self.root.exists()
        except PermissionError as error:
            raise ConfigError(f"ckpt.output_dir {self.root}: {error.strerror}: choose a folder of yours") from error
        if is_there and not self.root.is_dir():
            raise ConfigError(f"ckpt.output_dir {self.root} is a file: choose another folder")
        if resume and not has_checkpoint and (self.model.exists() or self.adapter.exists()):
            raise ConfigError(
                f"ckpt.load_enable is set, but {self.root} holds a finished run without checkpoints: "
                f"choose another --ckpt.output_dir"
            )
        is_run = self.config.exists() or self.metrics.exists()
        if not resume and is_run and (has_checkpoint or self._holds_results):
            go_on = "continue it with --ckpt.load_enable, or " if learns else ""
            raise ConfigError(f"ckpt.output_dir {self.root} holds another run: {go_on}choose another --ckpt.output_dir")
        theirs = self._not_of_a_run(has_checkpoint=has_checkpoint and not resume, learns=learns and not is_run)
        if theirs is not None:
            raise ConfigError(
                f"ckpt.output_dir {self.root}: {theirs.name} there was not written by a run, and this one would "
                "replace it: choose another --ckpt.output_dir"
            )

    def _not_of_a_run(self, *, has_checkpoint: bool, learns: bool) -> Path | None:
        """What a user may have put here, under a name that a run writes to: a model to start from, or settings."""
        if self.config.is_file():
            with self.config.open("rb") as settings:
                if settings.read(len(_DUMPED)) != _DUMPED:
                    return self.config
        if not learns:
            return None
        return self.checkpoints if has_checkpoint else next((model for model in self.models if model.exists()), None)

    @property
    def _holds_results(self) -> bool:
        """Whether something would be lost: a model, a step, or an evaluation that was all there was to do."""
        if any(model.exists() for model in self.models) or any(self.rollouts.glob("step_*")):
            return True
        if not self.metrics.exists():
            return False
        if not self.config.exists():  # numbers without settings: who knows whose they are
            return True
        # A run that trains writes its parameters first; its evaluation before the first step is made again.
        steps = [record["step"] for record in read_metrics(self.metrics)]
        return any(step > 0 for step in steps) or (bool(steps) and not self.parameters.exists())

    def open(self) -> None:
        """Make the folder, open to this user alone; one that is there keeps its mode: it may be shared on purpose.

        Raises ConfigError when that cannot be done.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"ckpt.output_dir {self.root} cannot be made: {error.strerror}") from error
