"""The held-out questions that a supervised stage samples responses to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.config.stages import DpoConfig, SamplingConfig
from vlmrl.data.judgements import is_desirable
from vlmrl.rewards.question_labels import label_questions
from vlmrl.trainer.evaluation import with_metric_names
from vlmrl.types import Prompt


def read_questions(
    config: SamplingConfig, prompts: RemotePrompts, say: Callable[[str], None]
) -> dict[str, list[Prompt]]:
    """Return the held-out questions that get responses, with labels, by the set's name in metrics.

    Raises DataError if no response could match any label of a set.
    """
    sets = {}
    for name, rows in with_metric_names(prompts.evaluation()).items():
        # With `data.truncate_enable` a conversation is learnt as far as it fits, but its last question may lie behind.
        short = [row for row in rows if len(row.tokens) <= config.data.max_len]
        if num_long := len(rows) - len(short):
            say(f"evaluation set {name}: {num_long} prompts are longer than data.max_len, and get no responses")
        sets[name] = label_questions(name, questions_of(config, short), config.reward, say)
    return sets


def questions_of(config: SamplingConfig, rows: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the rows whose questions are asked: of preferences those with a chosen or desirable response, which then
    is what responses are compared with."""
    if not isinstance(config, DpoConfig):
        return rows
    return [replace(row, label=None) for row in rows if row.label is None or is_desirable(row.label)]
