"""When a run evaluates its model, and what a failed or interrupted evaluation means for the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vlmrl.config.stages import SupervisedConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import StorageError, VlmrlError
from vlmrl.observe.report import RunReport
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.trainer.best_model import Best, read_best
from vlmrl.trainer.collect import Ending
from vlmrl.trainer.rl import LoopState
from vlmrl.trainer.run_checkpoints import RunCheckpoints
from vlmrl.types import Metrics

_Ending = TypeVar("_Ending", bound=VlmrlError)


@dataclass
class Evaluations:
    """The evaluations of a run. One that fails ends the run, after its step has been saved."""

    config: RlConfig | SupervisedConfig
    measure: Callable[[int], Metrics]
    """Evaluates the current model after this step; {} if nothing is held out."""
    checkpoints: RunCheckpoints
    report: RunReport
    last: int
    """Last step of the run."""
    error: VlmrlError | None = None
    """The failure of an evaluation, which ends the run once the step is saved."""
    last_evaluated: int | None = None
    """The newest step with an evaluation."""
    stop_reason: str | None = None
    """Why the run ends before its last step: evaluations no longer improve."""

    def after_step(self, step: int) -> Metrics:
        """Evaluate if this step is due; return the metrics."""
        interval = self.config.eval.steps
        if step != self.last and (interval <= 0 or step % interval):
            return {}
        try:
            with stops.interruptible():
                return self._run_and_keep_error(step, is_last=step == self.last)
        except Stopped:  # the step itself is finished, and is saved before the run ends
            self.checkpoints.evaluation_is_pending = True
            return {}

    def _run_and_keep_error(self, step: int, *, is_last: bool) -> Metrics:
        try:
            return self.run(step)
        except VlmrlError as error:
            saved = "whose model is saved" if is_last else "which is saved for --ckpt.load_enable"
            self.error = type(error)(f"evaluation after step {step}, {saved}: {error}")
            self.checkpoints.evaluation_is_pending = True
            return {}

    def finish_early(self, ending: Ending, *, has_adapter: bool) -> None:
        """Evaluate and save the last step of a run that ended before `self.last`; otherwise do nothing."""
        if ending.reason is None:
            return
        self.report.say(ending.reason)
        metrics: Metrics = {}
        if ending.step != self.last_evaluated:
            metrics = self._run_and_keep_error(ending.step, is_last=True)
        if ending.left_out:
            metrics = metrics | {"data/left_out": float(ending.left_out)}
        self.report.evaluation(ending.step, metrics)
        if ending.is_solved and self.config.ckpt.save_steps > 0:
            self.checkpoints.save_last_step()
        if self.error is not None:
            self.checkpoints.finish(has_adapter=has_adapter)
            raise self.error

    def save_on_error(self, error: _Ending) -> _Ending:
        """Save the last step; return the error with the checkpoint to resume from.

        The step of a failed evaluation is saved already.
        """
        try:
            saved = None if error is self.error else self.checkpoints.save_last_step()
        except VlmrlError as second_error:  # it must not hide why the run ended
            return type(error)(f"{error}; its last step is not saved: {second_error}")
        if saved is None:
            return error
        return type(error)(f"{error}; the steps before it are saved: resume from {saved} with --ckpt.load_enable")

    def save(self, step: int, state: LoopState | None = None, *, has_adapter: bool) -> None:
        """Write a checkpoint if one is due.

        After a failed evaluation one is always written, and the final models too if it was the last step; then the
        error is raised.
        """
        try:
            self.checkpoints.save(step, state, force=self.error is not None)
            if self.error is not None and step == self.last:
                self.checkpoints.finish(has_adapter=has_adapter)
        except StorageError as storage_error:
            if self.error is None:
                raise
            self.error = type(self.error)(f"{self.error}; but {storage_error}")
        if self.error is not None:
            raise self.error

    def run(self, step: int) -> Metrics:
        """Evaluate the current model."""
        with self.report.phase("eval"):
            metrics = self.measure(step)
        with stops.uninterrupted():
            best = self.checkpoints.keep_best(step, metrics)
        self.last_evaluated, self.checkpoints.evaluation_is_pending = step, False
        self._end_if_not_better(step, best)
        return metrics

    def resume(self, done: int) -> None:
        """End a resumed run at once whose evaluations had already stopped improving before its checkpoint."""
        if self._patience is not None and (metric := self.config.ckpt.best_metric_key) is not None:
            self._end_if_not_better(done, read_best(self.checkpoints.folder.best, metric=metric))

    @property
    def _patience(self) -> int | None:
        return self.config.eval.early_stop_patience if isinstance(self.config, SupervisedConfig) else None

    def _end_if_not_better(self, step: int, best: Best | None) -> None:
        patience = self._patience
        if best is not None and patience is not None and step - best.step >= patience * self.config.eval.steps:
            self.stop_reason = (
                f"{best.metric} has not been better than at step {best.step} ({best.value:.4g}) in {patience} "
                "evaluations (eval.early_stop_patience)"
            )
