import json
from typing import Any

import pytest

from vlmrl.data.conversations import answer_text, read_conversation, split_answer
from vlmrl.errors import DataError

USER = {"role": "user", "content": "2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}


def test_sharegpt_is_converted_to_messages() -> None:
    value = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": "4"},
        {"from": "observation", "value": "x"},
    ]
    system, other = {"role": "system", "content": "Be brief."}, {"role": "observation", "content": "x"}
    assert read_conversation(value).messages == [system, USER, ASSISTANT, other]


def test_messages_stored_as_json_text_are_parsed() -> None:
    image = {"type": "image", "image": "file:///data/a.png"}
    written = json.dumps([{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}])
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    assert read_conversation(written) == (question, ("file:///data/a.png",))
    assert read_conversation('[{"from": "human", "value": "2 + 2?"}]').messages == [USER]
    assert answer_text(json.dumps([ASSISTANT])) == json.dumps([ASSISTANT])  # an answer is kept as it is written


@pytest.mark.parametrize(
    "text", ['[{"role": "user"', '[{"role": "user"}]', '["role", "from"]', '{"role": 1}', "[" * 9999]
)
def test_other_json_stays_text(text: str) -> None:
    assert read_conversation(text) == (text, ())
    assert read_conversation(text + ' "role"') == (text + ' "role"', ())


@pytest.mark.parametrize(
    "value", ["text", "", None, 7, [], ["a"], [{"role": "user"}], [{"role": "user", "content": 7}]]
)
def test_values_that_are_not_conversations_are_returned_unchanged(value: Any) -> None:
    assert read_conversation(value) == (value, ())


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image", "image": "a.png", "text": None}, "a.png"),
        ({"type": "image", "image": {"bytes": b"x", "path": None}}, {"bytes": b"x", "path": None}),
        ({"type": "image", "path": "b.png"}, "b.png"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "data:image/png;base64,AA"),
        ({"type": "image_url", "image_url": "data:image/png;base64,AA"}, "data:image/png;base64,AA"),
        ({"type": "input_image", "image_url": "c.png"}, "c.png"),
    ],
)
def test_images_inside_messages_are_extracted_and_leave_a_placeholder(part: Any, source: Any) -> None:
    text = {"type": "text", "text": "What?"}
    content: list[Any] = [part, text, {"type": "image", "image": None}, {"type": "image", "image": "last.png"}]
    read = read_conversation([{"role": "user", "content": content}])
    placeholder = {"type": "image"}
    assert read.messages == [{"role": "user", "content": [placeholder, text, placeholder, placeholder]}]
    assert read.images == (source, "last.png")


def test_the_last_assistant_message_is_the_answer() -> None:
    assert split_answer([USER, ASSISTANT], None, None, column="answer") == ([USER], "4")
    # The default column may hold a label for rewards; a configured one would be ignored silently.
    assert split_answer([USER, ASSISTANT], "label", "4.0", column="answer") == ([USER], "4")
    with pytest.raises(DataError, match="column 'said' has another answer"):
        split_answer([USER, ASSISTANT], "four", None, column="said")


def test_the_answer_is_the_column_else_the_label() -> None:
    assert split_answer("q", "said", "label", column="answer") == ("q", "said")
    assert split_answer([USER], [ASSISTANT], None, column="completion") == ([USER], "4")
    assert split_answer("q", None, "label", column="answer") == ("q", "label")
    assert answer_text([{"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}]) == "ab"
    assert answer_text(4) == "4"
    assert answer_text(float("nan")) is None
    assert answer_text(ASSISTANT) == answer_text({"from": "gpt", "value": "4"}) == "4"


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        ("q", None, "no final assistant message, no value in column 'answer'"),
        ("q", "", "no final assistant message"),
        ([ASSISTANT], None, "there is no question"),
        ([USER, {"role": "assistant", "content": ""}], None, "the response is empty"),
        ("q", " ", "the response is empty"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": [1]}],
            None,
            "has tool_calls, which is not trained on",
        ),
        ([USER, {"role": "assistant", "content": [{"type": "image"}]}], None, "parts other than text"),
        ("q", [USER], "should be one assistant message; its messages have the roles user"),
        ("q", [USER, ASSISTANT], "its messages have the roles user, assistant"),
        ("q", ["4"], "the answer is a list; it should be a text or one assistant message"),
        ("q", {"text": "4"}, "its messages have the roles None"),
        ("q", b"4", "the answer is a bytes"),
    ],
)
def test_answers_that_cannot_be_trained_on(question: Any, answer: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_answer(question, answer, None, column="answer")
