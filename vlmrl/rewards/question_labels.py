"""Labels of the held-out questions that `vlmrl sft` samples responses to: of their rows, or the rows' responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from vlmrl.config.reward import Scoring
from vlmrl.data.labels import format_label
from vlmrl.errors import DataError
from vlmrl.rewards.final_answer import final_answer
from vlmrl.rewards.label_check import LabelCheck, built_in_that_need_labels
from vlmrl.types import Prompt

_LIMIT_S = 20.0
"""Seconds for parsing the labels of one set; those that are not parsed by then are taken for usable."""
_REASONING = re.compile(r"\n|[.!?]\s+\S")
"""A second line or sentence: only a response of the same words is equal, which `exact` may be meant to compare."""
_MAX_SHOWN = 3


def label_questions(
    name: str, prompts: Sequence[Prompt], reward: Scoring, say: Callable[[str], None] = print
) -> list[Prompt]:
    """Return the prompts of evaluation set `name` with labels that the built-in reward functions can use.

    A row without a label gets its response as its label. Without `exact` it must then be a final answer, or have one in
    a box or in `<answer>` tags. `say` shows how many rows are left out, and why.

    Raises:
        DataError: no row of the set has such a label, so pass@1 would be 0 whatever the model says.
    """
    labelled = [replace(prompt, label=prompt.answer) if prompt.label is None else prompt for prompt in prompts]
    needing = built_in_that_need_labels(reward)
    if not needing or not labelled:
        return labelled
    with closing(LabelCheck(needing)) as check:
        problems = check([prompt.label or "" for prompt in labelled], limit_s=_LIMIT_S)
    usable, unusable, from_responses = [], [], False
    for row, prompt, problem in zip(prompts, labelled, problems, strict=True):
        reason = problem
        if reason is None and row.label is None and "exact" not in needing:
            reason = _reasoning(prompt.label)
        if reason is None:
            usable.append(prompt)
            continue
        unusable.append(f"{prompt.source} {format_label(prompt.label or '')} ({reason})")
        from_responses |= row.label is None
    if not unusable:
        return usable
    advice = "set data.label_key to the column of the final answers"
    if from_responses:
        advice = (
            f"rows without a label are compared with their response: {advice}, end responses with \\boxed{{...}}, or "
            "compare whole responses with reward.functions exact"
        )
    line = (
        f"evaluation set {name}: {len(unusable)} of {len(prompts)} rows have labels that reward.functions "
        f"{' and '.join(needing)} cannot use: {'; '.join(unusable[:_MAX_SHOWN])}; {advice}"
    )
    if not usable:
        raise DataError(line)
    say(f"{line}. These rows get no responses")
    return usable


def _reasoning(response: str | None) -> str | None:
    """Say why a response is no final answer; None if it is one."""
    answer = final_answer(response or "")
    return "it is more than a final answer" if answer.place == "whole" and _REASONING.search(answer.text) else None
