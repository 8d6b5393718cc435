"""Sampling of responses, for training and for evaluation."""

from pydantic import Field

from vlmrl.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section, StepInterval, Text, Unread
from vlmrl.config.names import settings


class Rollout(Section):
    """Sampling of responses."""

    batch_size: PositiveInt = 128
    """Prompts per step."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses per prompt."""
    max_new_tokens: PositiveInt = 1024
    """Longest response, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, also applied to the trainer's log-probs."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling; a value below 1 needs temperature 1."""
    max_tokens_per_gpu: PositiveInt | None = None
    """Token budget of one forward pass without gradients; by default `train.max_tokens_per_gpu`."""


class HeldOut(Section):
    """Held-out rows."""

    dataset: Text | None = None
    """Evaluation data, named like `data.prompt_dataset`; several are separated by commas. None turns evaluation off."""
    split: str = "test"
    """Split of the evaluation data."""
    max_samples: PositiveInt = 100_000_000
    """Use at most this many rows of each evaluation set."""


class EvalRows(HeldOut):
    """Evaluation on held-out rows, during and after training."""

    steps: StepInterval = -1
    """Steps between evaluations; -1 means before and after training only."""
    early_stop_patience: PositiveInt | None = None
    """End the run after this many evaluations in a row without a better value of `ckpt.best_metric_key`."""


class EvalBase(HeldOut):
    """Held-out prompts, and the sampling of their responses."""

    temperature: NonNegativeFloat = 0.6
    """Sampling temperature of evaluation; 0 is greedy."""
    n_samples_per_prompt: PositiveInt = 1
    """Responses per evaluation prompt, for pass@k."""
    breakdown_key: str | None = "family"
    """Column of the evaluation data by whose values accuracy is also reported, if a set has it; None: no breakdown."""


class Eval(EvalBase):
    """Evaluation on held-out prompts, before, during and after training."""

    steps: StepInterval = -1
    """Steps between evaluations; -1 means before and after training only."""


class EvalOnly(EvalBase):
    """Evaluation on held-out prompts, without training."""

    dataset: Text
    """Evaluation data, named like `data.prompt_dataset`; several are separated by commas."""


def unread_of_eval(evaluation: Eval | EvalRows, *, holds_out: bool) -> Unread:
    """`holds_out`: held-out rows of the training data are evaluated."""
    if evaluation.dataset is not None:
        return {}
    if holds_out:
        return {"eval.split": "data.eval_fraction holds rows of data.prompt_split out, and there is no eval.dataset"}
    names = [name for name in settings(type(evaluation), "eval.") if name != "eval.dataset"]
    return dict.fromkeys(names, "nothing is evaluated without eval.dataset or data.eval_fraction")


def unread_of_patience(evaluation: EvalRows, *, best_metric_key: str | None) -> Unread:
    if best_metric_key is not None:
        return {}
    return {"eval.early_stop_patience": "ckpt.best_metric_key does not name the metric"}


def conflicts_of_eval(evaluation: EvalBase, *, evaluates: bool = True) -> list[str]:
    n = evaluation.n_samples_per_prompt
    if not evaluates or evaluation.temperature > 0 or n == 1:
        return []
    return [f"eval.temperature 0 gives the same response {n} times: set eval.n_samples_per_prompt to 1, or raise it"]
