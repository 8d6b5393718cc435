"""What a run leaves behind."""

from vlmrl.config.base import Every, PositiveInt, Section, Text, Unread


class Ckpt(Section):
    """Output folder and checkpoints."""

    output_dir: Text = "./ckpt"
    """Folder that everything of the run is written to."""
    save_steps: Every = -1
    """Checkpoint every so many steps; -1 means never."""
    max_num: PositiveInt = 3
    """Checkpoints kept; older ones are deleted."""
    save_on_stop: bool | None = None
    """Save a checkpoint when SIGTERM, SIGHUP or Ctrl-C stops the run; by default where `save_steps` asks for some."""
    load_enable: bool = False
    """Continue from the newest whole checkpoint in `output_dir`; a damaged one is named, and set aside."""
    best_metric_key: str | None = None
    """Metric of the evaluation, such as `eval/visual_math/pass@1`: the model that is best by it stays in best/ in
    `output_dir`, whatever becomes of the checkpoints. None keeps none."""

    @property
    def saves_on_stop(self) -> bool:
        return self.save_steps > 0 if self.save_on_stop is None else self.save_on_stop


class Wandb(Section):
    """Weights & Biases; on when `project` is set. The key comes from the environment variable WANDB_API_KEY."""

    project: str | None = None
    """Project; None turns W&B off."""
    org: str | None = None
    """Team or user."""
    group: str | None = None
    """Group of runs."""
    run_name: str | None = None
    """Name of the run; by default the output folder's."""


class Logger(Section):
    """Metrics and transcripts."""

    logging_steps: PositiveInt = 1
    """Write metrics every so many steps."""
    rollouts: bool = True
    """Write every prompt, response and reward under `rollouts/`."""
    tensorboard_dir: str | None = None
    """TensorBoard folder; by default `tensorboard/` in the output folder."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""


def unread_of_output(ckpt: Ckpt, logger: Logger) -> Unread:
    unread: Unread = {}
    if ckpt.save_steps == -1 and not ckpt.saves_on_stop:
        unread["ckpt.max_num"] = "no checkpoint is written while ckpt.save_steps is -1"
    if logger.wandb.project is None:
        names = ("logger.wandb.org", "logger.wandb.group", "logger.wandb.run_name")
        unread |= dict.fromkeys(names, "W&B is off without logger.wandb.project")
    return unread
