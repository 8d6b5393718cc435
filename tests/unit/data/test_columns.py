from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.columns import NO_REQUIREMENTS, RowRequirements, find_columns, value_at
from vlmrl.data.rows import Rows
from vlmrl.errors import DataError

LABEL = RowRequirements(label_for="reward.functions math")
PICTURE = Image.new("RGB", (4, 4))

_MEDIA = {"image_key": "images", "video_key": None}


def rows(*content: Mapping[str, Any], **more: Any) -> Rows:
    columns = tuple(dict.fromkeys(key for row in content for key in row))
    return Rows(name="mine", rows=content, columns=columns, **more)


def columns_of(
    source: Rows, requirements: RowRequirements = NO_REQUIREMENTS, others: Sequence[Rows] = (), **settings: Any
) -> dict[str, str | None]:
    return dict(find_columns(source, [source, *others], Columns(**settings), requirements))


def test_a_dotted_name_selects_a_field_of_a_column() -> None:
    row = {"reward_model": {"style": "rule", "ground_truth": "4"}, "a.b": 1}
    assert value_at(row, "reward_model.ground_truth") == "4"
    assert value_at(row, "a.b") == 1
    assert value_at(row, "reward_model.other") is value_at(row, "a.c.d") is value_at(row, None) is None
    verl = rows({"prompt": [{"role": "user", "content": "q"}], **row})
    assert columns_of(verl, LABEL, label_key="reward_model.ground_truth")["label_key"] == "reward_model.ground_truth"
    with pytest.raises(DataError, match=r"is empty in all of the 1 rows.*reward_model has: style, ground_truth"):
        columns_of(verl, LABEL, label_key="reward_model.groundtruth")


def test_substitute_columns_replace_a_missing_label() -> None:
    requirements = RowRequirements(label_for="reward.remote_url r.py:f", label_substitutes=frozenset({"answer"}))
    assert columns_of(rows({"input": "q", "answer": "4"}), requirements)["label_key"] == "label"
    assert columns_of(rows({"input": "q", "gold": "4"}), requirements, label_key="gold")["label_key"] == "gold"
    with pytest.raises(DataError, match=r"no column 'label' \(data.label_key\), which reward.remote_url r.py:f needs"):
        columns_of(rows({"input": "q", "gold": "4"}), requirements)
    with pytest.raises(DataError, match=r"'answer' .* is empty in all"):
        columns_of(rows({"input": "q", "answer": None}), requirements, label_key="answer")


@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
def test_standard_names_of_other_trainers_are_read_without_an_input_column(column: str) -> None:
    assert columns_of(rows({column: "q", "other": 1}))["input_key"] == column
    assert columns_of(rows({column: "q", "input": "i"}))["input_key"] == "input"


def test_two_standard_names_are_ambiguous() -> None:
    both = rows({"prompt": "q", "messages": []})
    with pytest.raises(DataError, match=r"columns prompt and messages: set data\.input_key to"):
        columns_of(both)
    assert columns_of(both, input_key="messages")["input_key"] == "messages"


def test_alpacas_instruction_and_input_are_ambiguous() -> None:
    alpaca = {"instruction": "Add them.", "input": "2, 2", "output": "4"}
    with pytest.raises(DataError, match=r"instruction and input \(Alpaca's format\).* set data\.input_key to its name"):
        columns_of(rows(alpaca))
    with pytest.raises(DataError, match=r"no answer to train on; .* did you mean --data\.output_key output\?"):
        columns_of(rows(alpaca), RowRequirements(answer=True), input_key="instruction")
    assert columns_of(rows(alpaca), input_key="instruction")["input_key"] == "instruction"
    assert columns_of(rows(alpaca, named_columns={"input_key": "input"}))["input_key"] == "input"


def test_a_completion_column_is_the_answer() -> None:
    keys = columns_of(rows({"prompt": "q", "completion": "c"}), RowRequirements(answer=True))
    assert keys == {"input_key": "prompt", "label_key": "label", "output_key": "completion"} | _MEDIA
    assert "output_key" not in columns_of(rows({"prompt": "q", "completion": "c"}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input": "q", "answer": "4"},
            r"no column 'label' .*which reward\.functions math needs; .*--data\.label_key answer",
        ),
        ({"input": "q", "label": None}, r"'label' \(data\.label_key\) is empty in all of the 1 rows"),
        (
            {"question": "q", "solution": "4"},
            r"no column 'input' .* and no column 'label' \(data\.label_key\).*key question\? .*label_key solution\?",
        ),
    ],
)
def test_missing_columns_are_reported_together_in_one_line(row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        columns_of(rows(row), LABEL)
    assert "\n" not in str(caught.value)


def test_each_dataset_needs_a_label_only_if_a_reward_needs_one() -> None:
    bare, labelled = rows({"input": "q"}), rows({"input": "q", "label": "4"})
    assert columns_of(bare)
    with pytest.raises(DataError, match=r"no column 'label'.* follow its name, NAME:input_key=COLUMN"):
        columns_of(bare, LABEL, others=[labelled])


@pytest.mark.parametrize(
    ("row", "is_enough"),
    [
        ({"input": "q"}, False),
        ({"input": "q", "label": "4"}, True),
        ({"input": "q", "answer": "4"}, True),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, True),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, True),
        ({"messages": [{"role": "user", "content": "q"}]}, False),
    ],
)
def test_supervised_training_needs_an_answer(row: Any, is_enough: bool) -> None:
    if is_enough:
        assert columns_of(rows(row), RowRequirements(answer=True))
    else:
        with pytest.raises(
            DataError, match=r"no column 'answer' \(data\.output_key\) nor 'label'.*no answer to train on"
        ):
            columns_of(rows(row), RowRequirements(answer=True))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("image", PICTURE),
        ("image_path", "pics/7"),
        ("picture", ["iVBORw0KGgo"]),
        ("figure", "a/b c.PNG"),
        ("figure", ["x.jpeg"]),
        ("url", "http://host/x.webp"),
        ("blob", b"\x89PNG\r\n"),
        ("pic", {"bytes": b"\xff\xd8\xff\xe0", "path": None}),
        ("view", [{"bytes": None, "path": "x.tif"}]),
        ("inline", "data:image/png;base64,AA"),
        ("shown", [PICTURE]),
    ],
)
def test_unread_images_are_an_error_that_names_the_setting(column: str, value: Any) -> None:
    source = rows(
        {"input": "What is <image>?", "label": "4", column: None}, {"input": "b", "label": "1", column: value}
    )
    with pytest.raises(DataError, match=rf"images in column '{column}'.* set data\.image_key to {column}, or to none"):
        columns_of(source)
    assert columns_of(source, image_key=column)["image_key"] == column
    assert columns_of(source, image_key=None)["image_key"] is columns_of(source, image_key="none")["image_key"] is None
    # Also when a column `images` exists but is empty.
    with pytest.raises(DataError, match=r"data\.image_key is 'images', which holds none in the rows read"):
        columns_of(rows({"input": "q", "images": [], column: value}))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("images", 3),
        ("image_count", 3),
        ("image", ""),
        ("image", None),
        ("note", "see a.png for it, or b.txt"),
        ("b", b"x"),
    ],
)
def test_values_that_only_resemble_images_are_ignored(column: str, value: Any) -> None:
    assert columns_of(rows({"input": "q", column: value}), image_key="images" if column != "images" else None)


def test_a_row_that_raises_is_left_for_the_draw() -> None:
    class Odd(dict[str, Any]):
        def get(self, *key: Any) -> Any:
            raise RuntimeError(key)

    odd = rows({"input": [Odd(role="user")], "image": Odd(), "label": Odd()})
    assert columns_of(odd, LABEL)["input_key"] == "input"
    odd = rows({"messages": [Odd(role="user")]})
    with pytest.raises(DataError, match="no answer to train on"):
        columns_of(odd, RowRequirements(answer=True))


def test_other_image_columns_are_allowed_if_one_is_read() -> None:
    assert columns_of(rows({"input": "q", "images": ["a.png"], "thumbnail": "b.png"}))
    inline = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    assert columns_of(rows({"messages": inline, "image_path": "a.png"}))


def test_rare_images_in_the_configured_column_are_found() -> None:
    content = [{"input": "q", "images": "a.png" if i == 5 else None, "screenshot_of": "b.png"} for i in range(200)]
    assert columns_of(rows(*content))["image_key"] == "images"
    with pytest.raises(DataError, match="has images in column 'screenshot_of'"):
        columns_of(rows(*(row | {"images": None} for row in content)))


def test_columns_of_one_dataset_override_the_settings_and_must_exist() -> None:
    source = rows({"q": "1 + 1?", "gold": "2", "input": "no"}, named_columns={"input_key": "q", "label_key": "gold"})
    assert columns_of(source, label_key="label", input_key="input") == {
        "input_key": "q",
        "label_key": "gold",
        **_MEDIA,
    }
    with pytest.raises(DataError, match=r"no column 'golden' \(data\.label_key\)"):
        columns_of(rows({"input": "q", "gold": 1}, named_columns={"label_key": "golden"}))
