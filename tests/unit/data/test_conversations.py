import json
from typing import Any

import pytest

from vlmrl.data.conversations import answer_text, read_conversation, split_answer
from vlmrl.errors import DataError

USER = {"role": "user", "content": "2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}


def test_sharegpt_becomes_messages() -> None:
    given = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": "4"},
        {"from": "observation", "value": "x"},
    ]
    system, other = {"role": "system", "content": "Be brief."}, {"role": "observation", "content": "x"}
    assert read_conversation(given).messages == [system, USER, ASSISTANT, other]


def test_messages_written_as_json_into_text_are_messages() -> None:
    image = {"type": "image", "image": "file:///data/a.png"}
    written = json.dumps([{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}])
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    assert read_conversation(written) == (question, ("file:///data/a.png",))
    assert read_conversation('[{"from": "human", "value": "2 + 2?"}]').messages == [USER]
    assert answer_text(json.dumps([ASSISTANT])) == json.dumps([ASSISTANT])  # what is taught is taught as it is written


@pytest.mark.parametrize(
    "text", ['[{"role": "user"', '[{"role": "user"}]', '["role", "from"]', '{"role": 1}', "[" * 9999]
)
def test_other_json_is_a_text_to_ask_about(text: str) -> None:
    assert read_conversation(text) == (text, ())
    assert read_conversation(text + ' "role"') == (text + ' "role"', ())


@pytest.mark.parametrize(
    "given", ["text", "", None, 7, [], ["a"], [{"role": "user"}], [{"role": "user", "content": 7}]]
)
def test_what_is_no_conversation_is_left_for_the_processor_to_refuse(given: Any) -> None:
    assert read_conversation(given) == (given, ())


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
def test_an_image_inside_a_message_is_taken_out_and_its_place_stays(part: Any, source: Any) -> None:
    text = {"type": "text", "text": "What?"}
    content: list[Any] = [part, text, {"type": "image", "image": None}, {"type": "image", "image": "last.png"}]
    read = read_conversation([{"role": "user", "content": content}])
    place = {"type": "image"}
    assert read.messages == [{"role": "user", "content": [place, text, place, place]}]
    assert read.images == (source, "last.png")


def test_the_last_message_of_the_assistant_is_what_is_learnt() -> None:
    assert split_answer([USER, ASSISTANT], None, None, column="answer") == ([USER], "4")
    # A label beside it is for rewards; only a column that was chosen for it would be passed over.
    assert split_answer([USER, ASSISTANT], "label", "4.0", column="answer") == ([USER], "4")
    with pytest.raises(DataError, match="column 'said' has another"):
        split_answer([USER, ASSISTANT], "four", None, column="said")


def test_an_answer_is_the_column_else_the_label() -> None:
    assert split_answer("q", "said", "label", column="answer") == ("q", "said")
    assert split_answer([USER], [ASSISTANT], None, column="completion") == ([USER], "4")
    assert split_answer("q", None, "label", column="answer") == ("q", "label")
    assert answer_text([{"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}]) == "ab"
    assert answer_text(4) == "4"


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        ("q", None, "neither a last message of the assistant, nor column 'answer'"),
        ("q", "", "neither a last message"),
        ([ASSISTANT], None, "nothing is asked"),
        ([USER, {"role": "assistant", "content": ""}], None, "neither a last message"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": [1]}],
            None,
            "has tool_calls, which is not taught",
        ),
        ([USER, {"role": "assistant", "content": [{"type": "image"}]}], None, "something else than text"),
        ("q", [USER], "should be one message of the assistant; its messages are of user"),
        ("q", [USER, ASSISTANT], "its messages are of user, assistant"),
    ],
)
def test_answers_that_cannot_be_taught(question: Any, answer: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_answer(question, answer, None, column="answer")
