import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from vlmrl.config.data import Columns
from vlmrl.data.labels import label_text
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import from_hugging_face, load_rows
from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.rewards.exact import score


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("  as it is ", "  as it is "),
        (7, "7"),
        (0.5, "0.5"),
        (True, "true"),
        (None, None),
        (float("nan"), None),
        (np.float32("nan"), None),
        (Decimal("3.50"), "3.50"),
        (Decimal("1E+3"), "1000"),
        (dt.date(2024, 1, 31), "2024-01-31"),
        (dt.datetime(2024, 1, 31, 12, 30, tzinfo=dt.UTC), "2024-01-31 12:30:00+00:00"),
        (dt.timedelta(minutes=90), "1:30:00"),
        (np.float32(0.1), "0.1"),
        (np.int64(3), "3"),
        (np.array([0.1, 2], dtype=np.float32), "[0.1, 2.0]"),
        (["é", 1], '["é", 1]'),
        ([Decimal("1.5"), Decimal("1.50")], '[1.5, "1.50"]'),
        ((1, [2, None]), "[1, [2, null]]"),
        ({"a": dt.date(2024, 1, 31)}, '{"a": "2024-01-31"}'),
    ],
)
def test_a_label_is_written_as_people_write_it(value: Any, text: str | None) -> None:
    assert label_text(value) == text


@pytest.mark.parametrize("value", [b"4", {1, 2}, object(), [object()]])
def test_a_value_without_a_text_form_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="a label is text"):
        label_text(value)


def test_narrow_floats_keep_their_shortest_decimal_form() -> None:
    """A column of float32 gives Python 0.10000000149011612, which no response equals."""
    data = datasets.Dataset.from_dict(
        {"narrow": [0.1], "many": [[0.1, 0.25]], "wide": [2.0**-15]},
        features=datasets.Features(
            {
                "narrow": datasets.Value("float32"),
                "many": datasets.List(datasets.Value("float32")),
                "wide": datasets.Value("float64"),
            }
        ),
    )
    rows = from_hugging_face("mine", data)
    assert rows.precisions == {"narrow": "float32", "many": "float32"}
    texts = {column: label_text(value, precision=rows.precisions.get(column)) for column, value in rows[0].items()}
    assert texts == {"narrow": "0.1", "many": "[0.1, 0.25]", "wide": "3.0517578125e-05"}


def test_labels_of_a_table_can_be_matched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    labels = [Decimal("3.50"), Decimal("-0.25")]
    features = datasets.Features({"input": datasets.Value("string"), "label": datasets.Value("decimal128(10, 2)")})
    datasets.Dataset.from_dict({"input": ["a", "b"], "label": labels}, features=features).to_parquet(
        tmp_path / "a.parquet"
    )
    rows = load_rows(str(tmp_path / "a.parquet"), split="train", max_samples=9, seed=0)
    texts = [label_text(row["label"]) for row in rows]
    assert texts == ["3.50", "-0.25"]
    assert score("3.5", texts[0]) == score("-1/4", str(texts[1])) == 1.0


def test_a_class_index_becomes_its_name_and_minus_one_becomes_none(text_model: Processor) -> None:
    features = datasets.Features(
        {
            "input": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "n": datasets.Value("int8"),
        }
    )
    data = datasets.Dataset.from_dict(
        {"input": ["a", "b", "c"], "label": [1, 0, -1], "n": [1, 0, -1]}, features=features
    )

    def labels(key: str) -> list[str | None]:
        rows = from_hugging_face("pets", data)
        stream = PromptStream([rows], probs=None, processor=text_model, columns=Columns(label_key=key), seed=0)
        return [prompt.label for prompt in stream.all_prompts(3)]

    assert labels("label") == ["dog", "cat", None]
    assert labels("n") == ["1", "0", "-1"]
