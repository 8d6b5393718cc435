"""The settings of the verbs that learn from data, without sampling responses for it."""

from typing import ClassVar

from vlmrl.config import rm, roles, rollout, sft
from vlmrl.config.base import Unread
from vlmrl.config.pairs import PairData
from vlmrl.config.rm import RewardActor, Rm
from vlmrl.config.rollout import EvalRows
from vlmrl.config.sft import Sft, SftData
from vlmrl.config.training import TrainingConfig

_ONLY_OF_RL = frozenset({"logger.rollouts", "ds.enable_sleep"})


class SupervisedConfig(TrainingConfig):
    """Training on the rows of a dataset: each row once per epoch, `train.batch_size` rows per optimizer step."""

    omits: ClassVar[frozenset[str]] = _ONLY_OF_RL

    eval: EvalRows = EvalRows()

    @property
    def evaluates(self) -> bool:
        """The run has held-out rows."""
        return self.eval.dataset is not None or self.data.eval_fraction > 0

    def unread(self) -> Unread:
        return (
            super().unread()
            | roles.unread_of_best(evaluates=self.evaluates)
            | rollout.unread_of_eval(self.eval, holds_out=self.data.eval_fraction > 0)
            | rollout.unread_of_patience(self.eval, best_metric_key=self.ckpt.best_metric_key)
        )

    def conflicts(self) -> list[str]:
        return [*roles.conflicts_of_best(self.ckpt, self.eval, evaluates=self.evaluates), *super().conflicts()]


class SftConfig(SupervisedConfig):
    """Supervised fine-tuning on the responses of a dataset."""

    verb: ClassVar[str] = "sft"

    data: SftData
    sft: Sft = Sft()

    def unread(self) -> Unread:
        return super().unread() | sft.unread_of_sft(self.sft)

    def conflicts(self) -> list[str]:
        return [*sft.conflicts_of_turns(self.data, self.sft), *super().conflicts()]


class RmConfig(SupervisedConfig):
    """Training of a reward model on preferences, or on labelled steps."""

    verb: ClassVar[str] = "rm"

    actor: RewardActor
    data: PairData
    rm: Rm = Rm()

    def unread(self) -> Unread:
        return super().unread() | rm.unread_of_rm(self.rm)
