"""Evaluation of supervised stages on responses that the model samples."""

from vlmrl.config.base import Unread
from vlmrl.config.names import settings
from vlmrl.config.reward import Scoring
from vlmrl.config.rollout import EvalBase, EvalRows
from vlmrl.config.vllm import Vllm


class SampledEval(EvalRows, EvalBase):
    """Evaluation on held-out rows: the loss of their responses, and responses of the model."""

    generate_enable: bool = False
    """Also sample responses to the held-out questions, with engines (`vllm.*`), and score them with `reward.functions`:
    pass@k, lengths and transcripts, as in `rl`. They are compared with the row's label, or, where it has none, with its
    response; in `dpo` with the chosen or desirable response. A response that they cannot be compared with (one that
    reasons first, for `math`) leaves its question out."""


def unread_of_generation(evaluation: SampledEval) -> Unread:
    if evaluation.generate_enable:
        return {}
    names = (
        *(f"eval.{name}" for name in ("temperature", "n_samples_per_prompt", "breakdown_key")),
        *settings(Scoring, "reward."),
        *settings(Vllm, "vllm."),
        *("rollout.max_new_tokens", "train.colocate_all"),
    )
    return dict.fromkeys(names, "eval.generate_enable is off, so no responses are sampled")
