"""Rows with a label for each step of a response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from prompt_streams import IMAGE, rows

from vlmrl.config.pairs import PairData
from vlmrl.data.columns import RowRequirements
from vlmrl.data.labelled_steps import LabelledSteps, StepStream, collate_steps, read_step_labels
from vlmrl.data.unusable import UnusableError
from vlmrl.errors import DataError
from vlmrl.plugins import Processor

NEEDS = RowRequirements(answer=True, label_for="rm.kind process", step_separator=";")


def stream(*content: Mapping[str, Any], processor: Processor, **settings: Any) -> StepStream:
    given = {"prompt_dataset": "mine", "max_dropped_fraction": 0.9, "output_key": "response", "label_key": "labels"}
    columns = PairData.model_validate(given | settings)
    return StepStream([rows(content)], probs=None, processor=processor, columns=columns, seed=0, requirements=NEEDS)


def draw(*content: Mapping[str, Any], processor: Processor, **settings: Any) -> LabelledSteps:
    return collate_steps(stream(*content, processor=processor, **settings).all_prompts(len(content)))


def labelled(steps: LabelledSteps, row: int, processor: Processor) -> list[tuple[str, float]]:
    """(text of the token, label) at the labelled tokens."""
    sample, labels = steps.samples[row], steps.labels[row]
    return [(processor.tokenizer.decode([sample.tokens[t]]), labels[t]) for t in np.flatnonzero(np.isfinite(labels))]


def test_labels_are_at_the_tokens_that_end_a_step(text_model: Processor) -> None:
    steps = draw(
        {"input": "a;b?", "response": "x;yy;z", "labels": [True, False, 0.25]},
        {"input": "c?", "response": ["u", "v"], "labels": ["+", "-"]},
        processor=text_model,
    )
    assert labelled(steps, 0, text_model) == [(";", 1.0), (";", 0.0), ("<|im_end|>", 0.25)]
    assert labelled(steps, 1, text_model) == [(";", 1.0), ("<|im_end|>", 0.0)]
    texts = [text_model.tokenizer.decode(sample.tokens[sample.sampled]) for sample in steps.samples]
    assert texts == ["x;yy;z<|im_end|>", "u;v<|im_end|>"]
    assert [sample.group for sample in steps.samples] == [0, 1]


def test_a_response_may_belong_to_an_image_and_to_messages(vlm: Processor) -> None:
    asked = [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "what?"}]}]
    steps = draw({"input": asked, "response": "red", "labels": [1]}, processor=vlm)
    assert len(steps.samples[0].media) == 1
    assert labelled(steps, 0, vlm) == [("<|im_end|>", 1.0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"response": "x;y", "labels": True}, "labels do not fit the steps: 1 labels for 2 steps$"),
        ({"response": "x;y", "labels": [1]}, "labels do not fit the steps: 1 labels for 2 steps$"),
        ({"response": "x,y", "labels": [1, 0]}, "2 labels for 1 steps; it has no rm.process_separator"),
        ({"response": "x;y", "labels": [1, 2]}, r"label 2 of column 'labels' .* is 2, not true, false, or a prob"),
        ({"response": "x;y", "labels": [1, -0.5]}, "label 2 of column 'labels'"),
        ({"response": "x;y", "labels": [1, "good"]}, "is 'good', not true"),
        ({"response": "x;y", "labels": [1, None]}, "is None, not true"),
        ({"response": "x", "labels": "+"}, r"column 'labels' \(data.label_key\) holds no list of labels"),
        ({"response": "x", "labels": []}, "holds no list of labels"),
        ({"response": "", "labels": [1]}, "no value in column 'response'"),
        ({"response": None, "labels": [1]}, "no value in column 'response'"),
        ({"response": "x" * 300, "labels": [1]}, "tokens with a response, data.max_len is 256"),
    ],
)
def test_a_row_that_cannot_be_used_is_dropped_with_the_reason(
    text_model: Processor, row: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"input": "c?", "response": "u;v", "labels": [1, 0]}
    steps = draw(good, {"input": "a?"} | row, good, processor=text_model, max_len=256)
    assert len(steps) == 2
    assert re.search(message, caplog.text.strip())


def test_a_dataset_without_labels_is_refused(text_model: Processor) -> None:
    with pytest.raises(DataError, match=r"no column 'labels' \(data.label_key\), which rm.kind process needs"):
        draw({"input": "a?", "response": "x"}, processor=text_model)


def test_numbers_that_are_no_probabilities_are_refused() -> None:
    assert read_step_labels([True, 0, 0.5, "-"], "labels") == (1.0, 0.0, 0.5, 0.0)
    assert read_step_labels(False, "labels") == (0.0,)
    assert read_step_labels('["+", 0]', "labels") == (1.0, 0.0), "as in CSV"
    with pytest.raises(UnusableError):
        read_step_labels([float("nan")], "labels")
