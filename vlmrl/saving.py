"""What a run goes on from and what it leaves behind: checkpoints, and the models at its end."""

from __future__ import annotations

from dataclasses import dataclass

from vlmrl.cluster.learners import RemoteCritic, RemotePolicy
from vlmrl.cluster.roles import RemotePrompts
from vlmrl.config.run import RlConfig, SftConfig
from vlmrl.learning.best import keep_best
from vlmrl.learning.folders import checkpoints, partial, prune, remove, remove_partial
from vlmrl.observe.folder import RunFolder
from vlmrl.observe.report import RunReport
from vlmrl.types import Metrics


@dataclass(frozen=True, slots=True)
class Saves:
    """A run's state, spread over roles, on its way to the run's folder and back."""

    config: RlConfig | SftConfig
    folder: RunFolder
    prompts: RemotePrompts
    policy: RemotePolicy
    report: RunReport
    critic: RemoteCritic | None = None

    def restore(self) -> tuple[int, float | None]:
        """Go on from the last checkpoint, if that is wanted and there is one.

        Returns the steps that are done, and the weight of the KL to the reference that the next one has; None: the one
        that the settings say.
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
        saved = checkpoints(self.folder.checkpoints) if self.config.ckpt.load_enable else []
        if not saved:
            return 0, None
        state = self.policy.load_checkpoint(saved[-1])
        if self.critic is not None:
            self.critic.load_checkpoint(self.folder.critic_checkpoints / saved[-1].name)
        self.prompts.load_state(state["prompts"])
        return int(state["step"]), state.get("kl_coef") if self._adapts_kl else None

    @property
    def _adapts_kl(self) -> bool:
        return isinstance(self.config, RlConfig) and self.config.algo.kl.target is not None

    def save(self, step: int, kl_coef: float | None = None, *, must: bool = False) -> None:
        """A checkpoint, if one is due or `must` be; `kl_coef` is that of the next step."""
        every = self.config.ckpt.save_steps
        if not must and (every <= 0 or step % every):
            return
        with self.report.phase("save"):
            # The policy's comes last: where it is, everything of the step is.
            if self.critic is not None:
                self.critic.save_checkpoint(self.folder.critic_checkpoints / self.folder.checkpoint(step).name)
            state = {"step": step, "prompts": self.prompts.state()} | ({"kl_coef": kl_coef} if self._adapts_kl else {})
            self.policy.save_checkpoint(self.folder.checkpoint(step), state)
            for parent in (self.folder.checkpoints, self.folder.critic_checkpoints):
                prune(parent, keep=self.config.ckpt.max_num)

    def keep_best(self, step: int, metrics: Metrics) -> None:
        """The model of now as `best/`, if `ckpt.best_metric_key` says so; `metrics` are those of its evaluation."""
        metric = self.config.ckpt.best_metric_key
        if metric is None:
            return
        with self.report.phase("save"):
            best, is_new = keep_best(self.folder.best, metrics, metric=metric, step=step, save=self.policy.save_model)
        if is_new:
            self.report.say(f"best {metric} so far: {best.value:.3g} at step {step}, in {self.folder.best}")

    def finish(self, *, has_adapter: bool) -> None:
        """The models that the run was for, and where everything is."""
        written = [("adapter", self.folder.adapter)] if has_adapter else [("model", self.folder.model)]
        with self.report.phase("save"):
            self.policy.save_model(written[0][1])
            if isinstance(self.config, RlConfig) and self.config.train.enable_ema:
                average = self.folder.average(has_adapter=has_adapter)
                self.policy.save_average(average)
                written.append(("moving average", average))
            if self.critic is not None and isinstance(self.config, RlConfig) and self.config.critic.save_value_network:
                self.critic.save_model(self.folder.critic)
                written.append(("critic", self.folder.critic))
        for name, file in (*written, ("curves", self.folder.curves), ("numbers", self.folder.metrics)):
            self.report.say(f"{name}: {file}")
