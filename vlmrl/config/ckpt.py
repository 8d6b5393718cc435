"""Output of a run: checkpoints, metrics and transcripts."""

from vlmrl.config.base import PositiveInt, Section, StepInterval, Text, Unread
from vlmrl.config.trackers import Mlflow, Swanlab, Trackio, Wandb, unread_of_trackers


class Ckpt(Section):
    """Output folder and checkpoints."""

    output_dir: Text = "./ckpt"
    """Folder for all files of the run."""
    save_steps: StepInterval = -1
    """Steps between checkpoints; -1 means never."""
    max_num: PositiveInt = 3
    """Checkpoints kept; older ones are deleted."""
    save_on_stop: bool | None = None
    """Save a checkpoint when SIGTERM, SIGHUP or Ctrl-C stops the run; by default if `save_steps` is above 0."""
    load_enable: bool = False
    """Resume from the newest complete checkpoint in `output_dir`; a damaged one is reported and moved aside."""
    best_metric_key: str | None = None
    """Evaluation metric, such as `eval/visual_math/pass@1`, by which the best model is kept in best/ in `output_dir`,
    independently of checkpoints. None keeps none."""

    @property
    def saves_on_stop(self) -> bool:
        return self.save_steps > 0 if self.save_on_stop is None else self.save_on_stop


class Logger(Section):
    """Metrics and transcripts."""

    logging_steps: PositiveInt = 1
    """Steps between lines of metrics. The first and the last step of a process are written too."""
    rollouts: bool = True
    """Write every prompt, response and reward under `rollouts/`."""
    report: bool = True
    """Write `report.html`, the run to look at, every few steps and at the end."""
    tensorboard_dir: str | None = None
    """TensorBoard folder; by default `tensorboard/` in the output folder."""
    sample_steps: StepInterval = 10
    """Steps between tables of sampled responses in TensorBoard and trackers, with `rollouts` on; -1 means never."""
    num_samples: PositiveInt = 4
    """Prompts in such a table, each with its best and its worst response. Evaluations always have one."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""
    mlflow: Mlflow = Mlflow()
    """MLflow."""
    trackio: Trackio = Trackio()
    """Trackio."""
    swanlab: Swanlab = Swanlab()
    """SwanLab."""


def unread_of_output(ckpt: Ckpt, logger: Logger) -> Unread:
    unread: Unread = {}
    if ckpt.save_steps == -1 and not ckpt.saves_on_stop:
        unread["ckpt.max_num"] = "no checkpoint is written while ckpt.save_steps is -1"
    return unread | unread_of_trackers(logger.wandb, logger.mlflow, logger.trackio, logger.swanlab)
