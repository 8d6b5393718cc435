"""Save and restore the state of a run: checkpoints, the best model, and the final models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.text import Text

from vlmrl.config.changes import changed_settings, format_changes, plain_settings
from vlmrl.config.num_steps import fraction_done
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError, MachineError, StorageError, VlmrlError
from vlmrl.learning.checkpoint_checksums import has_checksums
from vlmrl.learning.checkpoint_size import min_checkpoint_bytes
from vlmrl.observe.report import RunReport
from vlmrl.observe.run_folder import RunFolder
from vlmrl.system import stops
from vlmrl.system.atomic_folders import checkpoints, partial, prune, remove, remove_partial, set_aside
from vlmrl.system.stops import Stopped
from vlmrl.system.storage import check_room, size_of, writing
from vlmrl.trainer.best_model import Best, keep_best
from vlmrl.trainer.filtering import RewardRange
from vlmrl.trainer.protocols import Resumable
from vlmrl.trainer.rl import LoopState
from vlmrl.types import Metrics

_STEP_SETTINGS = {"rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size", "train.max_epochs"}
"""Settings that decide how many optimizer steps a run makes on the same data."""


@contextmanager
def naming_checkpoint(folder: Path) -> Iterator[None]:
    """Add the newest complete checkpoint in `folder`, if there is one, to errors within of the disk or of another
    machine: the same run can go on from it."""
    try:
        yield
    except (StorageError, MachineError) as error:
        try:
            complete = checkpoints(folder)
        except OSError:  # a disk that fails
            complete = []
        if complete:
            line = f"{error}; {complete[-1]} is complete: resume from it with --ckpt.load_enable"
        elif isinstance(error, MachineError):
            line = f"{error}; there is no checkpoint yet: start again with the same command"
        else:
            raise
        raise type(error)(line) from error


def _first_of(lines: Sequence[str]) -> str:
    return lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")


class SavedModel(Protocol):
    """A trained model, as checkpoints and final models need it."""

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """Describe the damaged files of a checkpoint, a line each; empty when all match their checksums."""

    def set_progress(self, share: float) -> None:
        """Move the learning rate's schedule to this share of the run."""

    def save_model(self, folder: Path) -> None:
        """Write the model for `from_pretrained`."""


class SavedPolicy(SavedModel, Protocol):
    """The policy, whose checkpoint also holds the state of the run itself."""

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the training state; `extra` is the state of the run."""

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Restore the training state; return `extra`."""

    def save_average(self, folder: Path) -> None:
        """Write the moving average of the weights."""

    def table(self) -> list[tuple[str, int, int]]:
        """Parts of the model, each with its numbers of trainable and of all parameters."""


class SavedCritic(SavedModel, Protocol):
    """The critic."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write the training state."""

    def load_checkpoint(self, folder: Path) -> None:
        """Restore the training state."""


class FinishedStep(NamedTuple):
    """A finished step, and what its checkpoint holds besides the models."""

    step: int
    extra: dict[str, Any]


@dataclass(slots=True)
class RunCheckpoints:
    """Saves a run's state, which is spread over its roles, to the run's folder, and restores it."""

    config: TrainingConfig
    folder: RunFolder
    data: Resumable
    """The training rows, or the source of responses to them."""
    policy: SavedPolicy
    report: RunReport
    critic: SavedCritic | None = None
    last_step: FinishedStep | None = None
    """Kept because a stop may ask for its checkpoint after prompts for the next step have been drawn."""
    evaluation_is_pending: bool = False
    """The evaluation of the last step failed, or a stop interrupted it: the resumed run makes it first."""

    def restore(self) -> tuple[int, LoopState | None]:
        """Resume from the newest undamaged checkpoint, if `ckpt.load_enable` is set and there is one.

        Returns the number of finished steps, and the loop's state for the next one; (0, None) for a new run.

        Raises ConfigError when there are checkpoints and all of them are damaged.
        """
        # Only partial files of this run: other folders may lie next to these. The best model starts as a partial one.
        for complete in (partial(self.folder.best), *self.folder.models):
            remove_partial(complete.parent, complete.name)
        for parent in (self.folder.checkpoints, self.folder.critic_checkpoints):
            remove_partial(parent, "step_*")
        names = {path.name for path in checkpoints(self.folder.checkpoints)}
        for path in checkpoints(self.folder.critic_checkpoints):
            if path.name not in names:
                # The run was killed before it wrote the policy's. Pruning would keep this, and delete complete ones.
                remove(path)
        newest = self._newest_undamaged() if self.config.ckpt.load_enable else None
        if newest is None:
            return 0, None
        extra = self.policy.load_checkpoint(newest)
        if self.critic is not None:
            self.critic.load_checkpoint(self.folder.critic_checkpoints / newest.name)
        self.data.load_state(extra["prompts"])
        self.evaluation_is_pending = bool(extra.get("evaluation_is_pending"))
        step = int(extra["step"])
        if changed := changed_settings(extra.get("settings", {}), self.config):
            # Not a plain string: values may look like Rich's markup.
            self.report.say(Text(f"resuming after step {step} with other settings: {format_changes(changed)}"))
        if changed.keys() & _STEP_SETTINGS:
            self._move_schedules(step)
        return step, self._loop_state(extra)

    @property
    def drawn(self) -> int:
        """Rows that the run has drawn so far. In `rl`, where the next rows replace dropped ones, without those."""
        return int(self.data.state()["position" if isinstance(self.config, RlConfig) else "drawn"])

    def _move_schedules(self, step: int) -> None:
        """Move the schedules to the run's progress: they count optimizer steps, whose number has changed."""
        share = fraction_done(self.config, self.data.num_rows, done=step, drawn=self.drawn)
        self.policy.set_progress(share)
        if self.critic is not None:
            self.critic.set_progress(share)

    def _newest_undamaged(self) -> Path | None:
        """Return the newest checkpoint whose files all match their checksums; None when there is no checkpoint.

        Newer, damaged ones are renamed, so that they neither count as the newest nor are deleted: some of their files
        may still be of use. Raises ConfigError when all are damaged.
        """
        damaged: list[tuple[Path, list[str]]] = []
        for folder in reversed(checkpoints(self.folder.checkpoints)):
            damage = self._damage(folder)
            if not damage:
                self._set_aside(damaged, resume_from=folder)
                return folder
            damaged.append((folder, damage))
        if damaged:
            folder, damage = damaged[0]
            raise ConfigError(
                f"all {len(damaged)} checkpoints in {self.folder.checkpoints} are damaged; the newest, {folder.name}: "
                f"{_first_of(damage)}: bring the file back, or start a new run with another --ckpt.output_dir"
            )
        return None

    def _damage(self, folder: Path) -> list[str]:
        if not has_checksums(folder):
            self.report.say(f"{folder} was written without checksums: assuming that it is undamaged")
        damage = self.policy.checkpoint_damage(folder)
        if self.critic is not None:
            critic = self.folder.critic_checkpoints / folder.name
            lines = self.critic.checkpoint_damage(critic) if critic.is_dir() else ["its folder is gone"]
            damage = damage + [f"critic/{folder.name}: {line}" for line in lines]
        return damage

    def _set_aside(self, damaged: Sequence[tuple[Path, list[str]]], *, resume_from: Path) -> None:
        for folder, damage in damaged:
            with writing(f"the new name of {folder.name}", folder.parent):
                renamed = set_aside(folder)
                critic = self.folder.critic_checkpoints / folder.name
                if critic.is_dir():
                    set_aside(critic)
            self.report.say(
                f"checkpoint {folder.name} is damaged: {_first_of(damage)}; it is renamed to {renamed.name}, and the "
                f"run resumes from {resume_from.name}"
            )

    def _loop_state(self, extra: dict[str, Any]) -> LoopState | None:
        if not isinstance(self.config, RlConfig):
            return None
        kl = self.config.algo.kl
        coef = kl.init_coef if kl.target is None else extra.get("kl_coef", kl.init_coef)
        return LoopState(coef, RewardRange(*extra["reward_range"]) if "reward_range" in extra else RewardRange())

    def _extra(self, step: int, state: LoopState | None) -> dict[str, Any]:
        extra: dict[str, Any] = {"step": step, "prompts": self.data.state(), "settings": plain_settings(self.config)}
        if isinstance(self.config, RlConfig) and state is not None:
            extra |= {} if self.config.algo.kl.target is None else {"kl_coef": state.kl_coef}
            extra |= {"reward_range": list(state.reward_range)} if self.config.algo.dynamic_filtering_enable else {}
        return extra | ({"evaluation_is_pending": True} if self.evaluation_is_pending else {})

    def save(self, step: int, state: LoopState | None = None, *, force: bool = False) -> None:
        """Write a checkpoint if one is due, requested by SIGUSR1, or `force` is set; `state` is for the next step."""
        interval = self.config.ckpt.save_steps
        is_requested = stops.take_checkpoint_request()
        self.last_step = FinishedStep(step, self._extra(step, state))
        if is_requested or force or (interval > 0 and step % interval == 0):
            self._write(*self.last_step)
        if is_requested:
            self.report.say(f"SIGUSR1: step {step} is saved in {self.folder.checkpoint(step)}")

    def save_last_step(self) -> Path | None:
        """Write the checkpoint of the last step unless it exists; return the newest checkpoint, if there is one."""
        if self.last_step is not None and not self.folder.checkpoint(self.last_step.step).exists():
            self._write(*self.last_step)
        return next(iter(checkpoints(self.folder.checkpoints)[::-1]), None)

    @contextmanager
    def saving_on_stop(self) -> Iterator[None]:
        """Let a stop interrupt only waits within the context, and save the last step before the run ends."""
        try:
            with stops.only_in_waits():
                yield
        except Stopped as stop:
            raise self.save_on_stop(stop) from None

    def save_on_stop(self, stop: Stopped) -> Stopped:
        """Save the last step, unless `ckpt.save_on_stop` forbids it; return the stop with where to resume from."""
        last = "before its first step was finished" if self.last_step is None else f"after step {self.last_step.step}"
        if self.config.ckpt.saves_on_stop:
            if self.last_step is not None:
                self.report.say(f"stopping: step {self.last_step.step} is saved first")
            try:
                self.save_last_step()
            except VlmrlError as error:  # a full disk, or a rank that the same signal has ended: still a stop
                last += f", which is not saved ({error})"
        path = next(iter(checkpoints(self.folder.checkpoints)[::-1]), None)
        if path is not None:
            return Stopped(stop.number, f"{last}; resume from {path} with --ckpt.load_enable")
        if self.last_step is not None and not self.config.ckpt.saves_on_stop:
            last += ", and nothing of it is saved (ckpt.save_on_stop)"
        return Stopped(stop.number, last)

    def _write(self, step: int, extra: dict[str, Any]) -> None:
        self.check_room(step)
        with self.report.phase("save"), writing(f"the checkpoint of step {step}", self.folder.checkpoints):
            # The policy's comes last: where it exists, the step's checkpoint is complete.
            if self.critic is not None:
                self.critic.save_checkpoint(self.folder.critic_checkpoints / self.folder.checkpoint(step).name)
            self.policy.save_checkpoint(self.folder.checkpoint(step), extra)
            for parent in (self.folder.checkpoints, self.folder.critic_checkpoints):
                prune(parent, keep=self.config.ckpt.max_num)

    def keep_best(self, step: int, metrics: Metrics) -> Best | None:
        """Save the current model as `best/` if an evaluation's metrics make it the best by `ckpt.best_metric_key`.

        Returns the record of the best model so far; None if none is kept, or its metric is unknown at this step.
        """
        metric = self.config.ckpt.best_metric_key
        if metric is None:
            return None
        if metric not in metrics and any(name.endswith("/failed") and count for name, count in metrics.items()):
            self.report.say(
                f"{metric} is unknown at step {step}, since responses could not be scored: {self.folder.best} stays"
            )
            return None
        with self.report.phase("save"):
            best, is_new = keep_best(self.folder.best, metrics, metric=metric, step=step, save=self.policy.save_model)
        if is_new:
            self.report.say(f"best {metric} so far: {best.value:.3g} at step {step}, in {self.folder.best}")
        return best

    def check_room_ahead(self, *, done: int, last: int) -> None:
        """Check the room for the next checkpoint, if one is due by step `last`, before hours of training depend on it.

        Raises StorageError.
        """
        interval = self.config.ckpt.save_steps
        if interval > 0 and (step := (done // interval + 1) * interval) <= last:
            self.check_room(step)

    def check_room(self, step: int) -> None:
        """Raise StorageError if the disk has no room for the checkpoint of this step.

        It needs as much as the newest one, the critic's part included; the first one at least a minimum.
        """
        newest = checkpoints(self.folder.checkpoints)[-1:]
        if newest:
            critic = self.folder.critic_checkpoints / newest[0].name
            needed = size_of(newest[0]) + (size_of(critic) if critic.is_dir() else 0)
        else:
            needed = min_checkpoint_bytes(self.config.actor, self.config.ds, self.policy.table())
        count = len(checkpoints(self.folder.checkpoints))
        hint = "free some space there" + (
            f", or lower --ckpt.max_num: it holds {count} checkpoints" if count > 1 else ""
        )
        check_room(needed, f"the checkpoint of step {step}", self.folder.checkpoints, hint=hint)

    def finish(self, *, has_adapter: bool) -> None:
        """Write the final models, and report where all results are.

        A stop interrupts this if the run saves a checkpoint on stop. If not, the models are finished first: they are
        all that a run has left after its last step.
        """
        written = [("adapter", self.folder.adapter)] if has_adapter else [("model", self.folder.model)]
        guard: AbstractContextManager[object] = (
            nullcontext() if self.config.ckpt.saves_on_stop else stops.uninterrupted()
        )
        with guard, self.report.phase("save"):
            self.policy.save_model(written[0][1])
            if isinstance(self.config, RlConfig) and self.config.train.enable_ema:
                average = self.folder.average(has_adapter=has_adapter)
                self.policy.save_average(average)
                written.append(("moving average", average))
            if self.critic is not None and isinstance(self.config, RlConfig) and self.config.critic.save_value_network:
                self.critic.save_model(self.folder.critic)
                written.append(("critic", self.folder.critic))
        stops.mark_done()
        pages = [("report", self.folder.report)] if self.config.logger.report else []
        for name, file in (*written, *pages, ("curves", self.folder.curves), ("numbers", self.folder.metrics)):
            self.report.say(f"{name}: {file}")
