"""What a run goes on from and what it leaves behind: checkpoints, and the models at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.text import Text

from vlmrl.config.changes import changes, described, plain_settings
from vlmrl.config.run import RlConfig, SftConfig
from vlmrl.config.schedule import share_done
from vlmrl.errors import ConfigError, StorageError, VlmrlError
from vlmrl.learning.checkpoint_size import least_bytes
from vlmrl.learning.checksums import has_checksums
from vlmrl.observe.atomic import checkpoints, partial, prune, remove, remove_partial, set_aside
from vlmrl.observe.report import RunReport
from vlmrl.observe.run_folder import RunFolder
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.system.storage import check_room, size_of, writing
from vlmrl.trainer.best_model import keep_best
from vlmrl.trainer.filtering import Seen
from vlmrl.trainer.rl import Carried
from vlmrl.types import Metrics

_SIZES = {"rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size", "train.max_epochs"}
"""Settings that say how many optimizer steps a run has of the same data."""


@contextmanager
def naming_checkpoint(folder: Path) -> Iterator[None]:
    """Within the context an error of the disk says which checkpoint of `folder` is whole, if there is one."""
    try:
        yield
    except StorageError as error:
        try:
            whole = checkpoints(folder)
        except OSError:  # a disk that fails
            whole = []
        if not whole:
            raise
        raise StorageError(f"{error}; {whole[-1]} is whole: go on from it with --ckpt.load_enable") from error


def _few(lines: Sequence[str]) -> str:
    return lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")


class ResumablePrompts(Protocol):
    """The stream of training rows, as far as a checkpoint knows it."""

    @property
    def num_rows(self) -> int:
        """Rows that can be drawn in one episode."""

    def state(self) -> dict[str, Any]:
        """The position in the data, to be saved."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""


class SavedModel(Protocol):
    """A model that trains, as far as checkpoints and final models know it."""

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """What is wrong with the files of a checkpoint, a line each; nothing when all are as they were written."""

    def follow(self, share: float) -> None:
        """Put the learning rate's schedule where a run is that has done this share of its steps."""

    def save_model(self, folder: Path) -> None:
        """Write the model for `from_pretrained`."""


class SavedPolicy(SavedModel, Protocol):
    """The policy: its checkpoint holds also what the run itself needs in order to go on."""

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write what training goes on from; `extra` is the run's own."""

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns its `extra`."""

    def save_average(self, folder: Path) -> None:
        """Write the moving average of the weights."""

    def table(self) -> list[tuple[str, int, int]]:
        """Parts of the model, with their trainable and all parameters."""


class SavedCritic(SavedModel, Protocol):
    """The critic."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write what training goes on from."""

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint."""


class Finished(NamedTuple):
    """A step that is done, and what a checkpoint of it holds beside the models."""

    step: int
    extra: dict[str, Any]


@dataclass(slots=True)
class Saves:
    """A run's state, spread over roles, on its way to the run's folder and back."""

    config: RlConfig | SftConfig
    folder: RunFolder
    prompts: ResumablePrompts
    policy: SavedPolicy
    report: RunReport
    critic: SavedCritic | None = None
    finished: Finished | None = None
    """The last step: a checkpoint of it may be wanted after prompts for the next one have been drawn."""
    owes_evaluation: bool = False
    """The evaluation of the last step was abandoned by a stop: the run that goes on makes it first."""

    def restore(self) -> tuple[int, Carried | None]:
        """Go on from the last checkpoint, if that is wanted and there is one.

        Returns the steps that are done, and what they leave to the next one; None for a run that starts.

        Raises ConfigError when there are checkpoints and none of them is whole.
        """
        # Others may have folders beside them. What becomes the best model is written as a whole one first.
        for whole in (partial(self.folder.best), *self.folder.models):
            remove_partial(whole.parent, whole.name)
        for parent in (self.folder.checkpoints, self.folder.critic_checkpoints):
            remove_partial(parent, "step_*")
        complete = {path.name for path in checkpoints(self.folder.checkpoints)}
        for path in checkpoints(self.folder.critic_checkpoints):
            if path.name not in complete:
                # The run was killed before the policy's came. As the newest it would outlive others that are whole.
                remove(path)
        newest = self._newest_whole() if self.config.ckpt.load_enable else None
        if newest is None:
            return 0, None
        state = self.policy.load_checkpoint(newest)
        if self.critic is not None:
            self.critic.load_checkpoint(self.folder.critic_checkpoints / newest.name)
        self.prompts.load_state(state["prompts"])
        self.owes_evaluation = bool(state.get("owes_evaluation"))
        step = int(state["step"])
        if changed := changes(state.get("settings", {}), self.config):
            # Not a plain string: values may look like Rich's markup.
            self.report.say(Text(f"going on from step {step} with other settings: {described(changed)}"))
        if changed.keys() & _SIZES:
            self._follow(step)
        return step, self._carried(state)

    @property
    def drawn(self) -> int:
        """Rows that the run has drawn so far."""
        return int(self.prompts.state()["position"])

    def _follow(self, step: int) -> None:
        """Put the schedules where the run is: they count optimizer steps, of which there are more or fewer now."""
        share = share_done(self.config, self.prompts.num_rows, done=step, drawn=self.drawn)
        self.policy.follow(share)
        if self.critic is not None:
            self.critic.follow(share)

    def _newest_whole(self) -> Path | None:
        """The newest checkpoint of which every file is as it was written; None where there is no checkpoint.

        Those that are newer get other names, so that they neither count as the newest nor are deleted: what is whole in
        them may be worth something. Raises ConfigError when none is whole.
        """
        damaged: list[tuple[Path, list[str]]] = []
        for folder in reversed(checkpoints(self.folder.checkpoints)):
            found = self._damage(folder)
            if not found:
                self._set_aside(damaged, whole=folder)
                return folder
            damaged.append((folder, found))
        if damaged:
            folder, found = damaged[0]
            raise ConfigError(
                f"none of the {len(damaged)} checkpoints in {self.folder.checkpoints} is whole; the newest, "
                f"{folder.name}: {_few(found)}: bring the file back, or start anew with another --ckpt.output_dir"
            )
        return None

    def _damage(self, folder: Path) -> list[str]:
        if not has_checksums(folder):
            self.report.say(f"{folder} was written without checksums: it is taken to be whole")
        found = self.policy.checkpoint_damage(folder)
        if self.critic is not None:
            critic = self.folder.critic_checkpoints / folder.name
            lines = self.critic.checkpoint_damage(critic) if critic.is_dir() else ["its folder is gone"]
            found = found + [f"critic/{folder.name}: {line}" for line in lines]
        return found

    def _set_aside(self, damaged: Sequence[tuple[Path, list[str]]], *, whole: Path) -> None:
        for folder, found in damaged:
            with writing(f"the new name of {folder.name}", folder.parent):
                kept = set_aside(folder)
                critic = self.folder.critic_checkpoints / folder.name
                if critic.is_dir():
                    set_aside(critic)
            self.report.say(
                f"checkpoint {folder.name} is damaged: {_few(found)}; it is {kept.name} now, and the run goes on from "
                f"{whole.name}"
            )

    def _carried(self, state: dict[str, Any]) -> Carried | None:
        if not isinstance(self.config, RlConfig):
            return None
        kl = self.config.algo.kl
        coef = kl.init_coef if kl.target is None else state.get("kl_coef", kl.init_coef)
        return Carried(coef, Seen(*state["seen"]) if "seen" in state else Seen())

    def _extra(self, step: int, carried: Carried | None) -> dict[str, Any]:
        extra: dict[str, Any] = {"step": step, "prompts": self.prompts.state(), "settings": plain_settings(self.config)}
        if isinstance(self.config, RlConfig) and carried is not None:
            extra |= {} if self.config.algo.kl.target is None else {"kl_coef": carried.kl_coef}
            extra |= {"seen": list(carried.seen)} if self.config.algo.dynamic_filtering_enable else {}
        return extra | ({"owes_evaluation": True} if self.owes_evaluation else {})

    def save(self, step: int, carried: Carried | None = None, *, must: bool = False) -> None:
        """A checkpoint, if one is due, asked for (SIGUSR1) or `must` be; `carried` is what the next step is given."""
        every = self.config.ckpt.save_steps
        is_asked = stops.take_checkpoint_request()
        self.finished = Finished(step, self._extra(step, carried))
        if is_asked or must or (every > 0 and step % every == 0):
            self._write(*self.finished)
        if is_asked:
            self.report.say(f"SIGUSR1: step {step} is saved in {self.folder.checkpoint(step)}")

    def save_finished(self) -> Path | None:
        """The checkpoint of the last step, written if there is none yet; None before the first step."""
        if self.finished is not None and not self.folder.checkpoint(self.finished.step).exists():
            self._write(*self.finished)
        return next(iter(checkpoints(self.folder.checkpoints)[::-1]), None)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The steps of a run: a stop interrupts waits and nothing else, and loses no step that is done."""
        try:
            with stops.only_in_waits():
                yield
        except Stopped as stop:
            raise self.stopped(stop) from None

    def stopped(self, stop: Stopped) -> Stopped:
        """The stop with a line that says from where another run can go on; saves the last step if that is wanted."""
        done = "before its first step was done" if self.finished is None else f"after step {self.finished.step}"
        if self.config.ckpt.saves_on_stop:
            try:
                self.save_finished()
            except VlmrlError as error:  # a full disk, or a rank that the same signal has ended: it was a stop
                done += f", which is not saved ({error})"
        path = next(iter(checkpoints(self.folder.checkpoints)[::-1]), None)
        if path is None:
            is_told = self.finished is None or self.config.ckpt.saves_on_stop
            lost = "" if is_told else ", and nothing of it is saved (ckpt.save_on_stop)"
            return Stopped(stop.number, done + lost)
        return Stopped(stop.number, f"{done}; go on from {path} with --ckpt.load_enable")

    def _write(self, step: int, extra: dict[str, Any]) -> None:
        self.check_room(step)
        with self.report.phase("save"), writing(f"the checkpoint of step {step}", self.folder.checkpoints):
            # The policy's comes last: where it is, everything of the step is.
            if self.critic is not None:
                self.critic.save_checkpoint(self.folder.critic_checkpoints / self.folder.checkpoint(step).name)
            self.policy.save_checkpoint(self.folder.checkpoint(step), extra)
            for parent in (self.folder.checkpoints, self.folder.critic_checkpoints):
                prune(parent, keep=self.config.ckpt.max_num)

    def keep_best(self, step: int, metrics: Metrics) -> None:
        """The model of now as `best/`, if `ckpt.best_metric_key` says so; `metrics` are those of its evaluation."""
        metric = self.config.ckpt.best_metric_key
        if metric is None:
            return
        if metric not in metrics and any(name.endswith("/failed") and count for name, count in metrics.items()):
            self.report.say(
                f"{metric} is not known at step {step}, since responses were not scored: {self.folder.best} stays"
            )
            return
        with self.report.phase("save"):
            best, is_new = keep_best(self.folder.best, metrics, metric=metric, step=step, save=self.policy.save_model)
        if is_new:
            self.report.say(f"best {metric} so far: {best.value:.3g} at step {step}, in {self.folder.best}")

    def look_ahead(self, *, done: int, last: int) -> None:
        """Ask now, and not after hours of training, for the room of the next checkpoint, if one is due before the run
        ends. Raises StorageError."""
        every = self.config.ckpt.save_steps
        if every > 0 and (step := (done // every + 1) * every) <= last:
            self.check_room(step)

    def check_room(self, step: int) -> None:
        """Raises StorageError where the disk has no room for the checkpoint of this step.

        As much as the newest one takes, its critic's part included; for the first the least that it can take.
        """
        newest = checkpoints(self.folder.checkpoints)[-1:]
        if newest:
            critic = self.folder.critic_checkpoints / newest[0].name
            needed = size_of(newest[0]) + (size_of(critic) if critic.is_dir() else 0)
        else:
            needed = least_bytes(self.config.actor, self.config.ds, self.policy.table())
        kept = len(checkpoints(self.folder.checkpoints))
        cure = "free some space there" + (
            f", or lower --ckpt.max_num: {kept} checkpoints lie there" if kept > 1 else ""
        )
        check_room(needed, f"the checkpoint of step {step}", self.folder.checkpoints, cure=cure)

    def finish(self, *, has_adapter: bool) -> None:
        """The models that the run was for, and where everything is.

        A stop abandons them where a checkpoint takes their place; where none would, they are finished: a run that has
        made its last step has nothing else to lose.
        """
        written = [("adapter", self.folder.adapter)] if has_adapter else [("model", self.folder.model)]
        whole: AbstractContextManager[object] = nullcontext() if self.config.ckpt.saves_on_stop else stops.finishing()
        with whole, self.report.phase("save"):
            self.policy.save_model(written[0][1])
            if isinstance(self.config, RlConfig) and self.config.train.enable_ema:
                average = self.folder.average(has_adapter=has_adapter)
                self.policy.save_average(average)
                written.append(("moving average", average))
            if self.critic is not None and isinstance(self.config, RlConfig) and self.config.critic.save_value_network:
                self.critic.save_model(self.folder.critic)
                written.append(("critic", self.folder.critic))
        stops.done()
        for name, file in (*written, ("curves", self.folder.curves), ("numbers", self.folder.metrics)):
            self.report.say(f"{name}: {file}")
