from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.columns import NOTHING, Wants, find_columns, value_at
from vlmrl.data.rows import Rows
from vlmrl.errors import DataError

LABEL = Wants(label="reward.functions math")
PICTURE = Image.new("RGB", (4, 4))


def rows(*content: Mapping[str, Any], **more: Any) -> Rows:
    columns = tuple(dict.fromkeys(key for row in content for key in row))
    return Rows(name="mine", rows=content, columns=columns, **more)


def found(source: Rows, wants: Wants = NOTHING, others: Sequence[Rows] = (), **settings: Any) -> dict[str, str | None]:
    return dict(find_columns(source, [source, *others], Columns(**settings), wants))


def test_a_place_inside_a_column_has_a_dotted_name() -> None:
    row = {"reward_model": {"style": "rule", "ground_truth": "4"}, "a.b": 1}
    assert value_at(row, "reward_model.ground_truth") == "4"
    assert value_at(row, "a.b") == 1
    assert value_at(row, "reward_model.other") is value_at(row, "a.c.d") is value_at(row, None) is None
    verl = rows({"prompt": [{"role": "user", "content": "q"}], **row})
    assert found(verl, LABEL, label_key="reward_model.ground_truth")["label_key"] == "reward_model.ground_truth"
    with pytest.raises(DataError, match=r"holds nothing in any of 1 rows.*reward_model has: style, ground_truth"):
        found(verl, LABEL, label_key="reward_model.groundtruth")


def test_a_label_that_is_asked_for_by_its_columns_name_is_there_or_missing() -> None:
    wants = Wants(label="reward.remote_url r.py:f", instead=frozenset({"answer"}))
    assert found(rows({"input": "q", "answer": "4"}), wants)["label_key"] == "label"
    assert found(rows({"input": "q", "gold": "4"}), wants, label_key="gold")["label_key"] == "gold"
    with pytest.raises(DataError, match=r"no column 'label' \(data.label_key\), which reward.remote_url r.py:f needs"):
        found(rows({"input": "q", "gold": "4"}), wants)
    with pytest.raises(DataError, match=r"'answer' .* holds nothing"):
        found(rows({"input": "q", "answer": None}), wants, label_key="answer")


@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
def test_the_names_of_other_trainers_are_read_where_there_is_no_input(column: str) -> None:
    assert found(rows({column: "q", "other": 1}))["input_key"] == column
    assert found(rows({column: "q", "input": "i"}))["input_key"] == "input"


def test_two_such_names_want_a_choice() -> None:
    both = rows({"prompt": "q", "messages": []})
    with pytest.raises(DataError, match=r"columns prompt and messages: say with data\.input_key which"):
        found(both)
    assert found(both, input_key="messages")["input_key"] == "messages"


def test_alpacas_instruction_is_not_lost_beside_its_input() -> None:
    alpaca = {"instruction": "Add them.", "input": "2, 2", "output": "4"}
    with pytest.raises(DataError, match=r"instruction and input \(Alpaca's form\).* name it with data\.input_key"):
        found(rows(alpaca))
    with pytest.raises(DataError, match=r"nothing says what to learn; .* did you mean --data\.output_key output\?"):
        found(rows(alpaca), Wants(answer=True), input_key="instruction")
    assert found(rows(alpaca), input_key="instruction")["input_key"] == "instruction"
    assert found(rows(alpaca, named_columns={"input_key": "input"}))["input_key"] == "input"


def test_the_completion_is_the_answer_of_a_prompt() -> None:
    keys = found(rows({"prompt": "q", "completion": "c"}), Wants(answer=True))
    assert keys == {"input_key": "prompt", "label_key": "label", "output_key": "completion", "image_key": "images"}
    assert "output_key" not in found(rows({"prompt": "q", "completion": "c"}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input": "q", "answer": "4"},
            r"no column 'label' .*which reward\.functions math needs; .*--data\.label_key answer",
        ),
        ({"input": "q", "label": None}, r"'label' \(data\.label_key\) holds nothing in any of 1 rows"),
        (
            {"question": "q", "solution": "4"},
            r"no column 'input' .* and no column 'label' \(data\.label_key\).*key question\? .*label_key solution\?",
        ),
    ],
)
def test_a_missing_label_is_found_with_every_other_column_before_any_row_is_used(row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        found(rows(row), LABEL)
    assert "\n" not in str(caught.value)


def test_a_label_is_wanted_of_every_dataset_and_only_where_something_needs_it() -> None:
    bare, labelled = rows({"input": "q"}), rows({"input": "q", "label": "4"})
    assert found(bare)
    with pytest.raises(DataError, match=r"no column 'label'.* follow its name, NAME:input_key=COLUMN"):
        found(bare, LABEL, others=[labelled])


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
def test_supervised_training_wants_something_to_say(row: Any, is_enough: bool) -> None:
    if is_enough:
        assert found(rows(row), Wants(answer=True))
    else:
        with pytest.raises(DataError, match=r"no column 'answer' \(data\.output_key\) nor 'label'.*nothing says what"):
            found(rows(row), Wants(answer=True))


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
def test_images_in_a_column_that_is_not_read_are_an_error_that_names_the_flag(column: str, value: Any) -> None:
    source = rows(
        {"input": "What is <image>?", "label": "4", column: None}, {"input": "b", "label": "1", column: value}
    )
    with pytest.raises(DataError, match=rf"images in column '{column}'.* set data\.image_key to {column}, or to none"):
        found(source)
    assert found(source, image_key=column)["image_key"] == column
    assert found(source, image_key=None)["image_key"] is found(source, image_key="none")["image_key"] is None
    # A column `images` that is always empty is no excuse.
    with pytest.raises(DataError, match=r"data\.image_key is 'images', which holds none in the rows looked at"):
        found(rows({"input": "q", "images": [], column: value}))


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
def test_what_only_sounds_like_images_is_none(column: str, value: Any) -> None:
    assert found(rows({"input": "q", column: value}), image_key="images" if column != "images" else None)


def test_a_row_that_nobody_can_judge_is_left_for_the_draw() -> None:
    class Odd(dict[str, Any]):
        def get(self, *key: Any) -> Any:
            raise RuntimeError(key)

    odd = rows({"input": [Odd(role="user")], "image": Odd(), "label": Odd()})
    assert found(odd, LABEL)["input_key"] == "input"
    odd = rows({"messages": [Odd(role="user")]})
    with pytest.raises(DataError, match="nothing says what to learn"):
        found(odd, Wants(answer=True))


def test_other_images_are_no_mistake_where_some_are_read() -> None:
    assert found(rows({"input": "q", "images": ["a.png"], "thumbnail": "b.png"}))
    inline = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    assert found(rows({"messages": inline, "image_path": "a.png"}))


def test_images_that_few_rows_have_are_found_before_another_column_is_taken_for_them() -> None:
    content = [{"input": "q", "images": "a.png" if i == 5 else None, "screenshot_of": "b.png"} for i in range(200)]
    assert found(rows(*content))["image_key"] == "images"
    with pytest.raises(DataError, match="has images in column 'screenshot_of'"):
        found(rows(*(row | {"images": None} for row in content)))


def test_columns_of_one_dataset_win_over_the_settings_and_must_exist() -> None:
    source = rows({"q": "1 + 1?", "gold": "2", "input": "no"}, named_columns={"input_key": "q", "label_key": "gold"})
    assert found(source, label_key="label", input_key="input") == {
        "input_key": "q",
        "label_key": "gold",
        "image_key": "images",
    }
    with pytest.raises(DataError, match=r"no column 'golden' \(data\.label_key\)"):
        found(rows({"input": "q", "gold": 1}, named_columns={"label_key": "golden"}))
