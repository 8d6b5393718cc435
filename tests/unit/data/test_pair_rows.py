from __future__ import annotations

from typing import Any

import pytest

from vlmrl.data.pair_rows import check_roles, read_margin, read_side
from vlmrl.data.unusable import UnusableError

KEYS = {"input_key": "input", "image_key": "images", "chosen_key": "chosen", "rejected_key": "rejected"}
IMAGE = {"type": "image", "image": "a.png"}


def turns(*roles_and_texts: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in roles_and_texts]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_text_responds_to_the_column_of_questions() -> None:
    side = read_side({"input": "2 + 2?", "chosen": "four"}, KEYS, "chosen_key")
    assert side == ("2 + 2?", (), "four")
    side = read_side({"input": turns(("user", [IMAGE])), "chosen": 4}, KEYS, "chosen_key")
    assert side == (turns(("user", [{"type": "image"}])), ("a.png",), "4")


@pytest.mark.parametrize(
    "conversation",
    [
        turns(("user", "2 + 2?"), ("assistant", "four")),
        [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "four"}],
        '[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]',
    ],
    ids=["OpenAI", "ShareGPT", "JSON"],
)
@pytest.mark.parametrize("given", [{}, {"input": "2 + 2?"}, {"input": turns(("user", "2 + 2?"))}])
def test_a_conversation_has_its_question(conversation: Any, given: dict[str, Any]) -> None:
    side = read_side({**given, "rejected": conversation}, KEYS, "rejected_key")
    assert side == (turns(("user", "2 + 2?")), (), "four")


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ("a", [{"type": "text", "text": "a"}]),
        ("a b", [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "index": None}]),
        ("a", [IMAGE, {"type": "text", "text": "a"}]),
        (turns(("user", [{"type": "text", "text": "a"}])), "a"),
        (turns(("system", "s"), ("user", "a")), "a"),
    ],
)
def test_a_question_is_repeated_in_whatever_form_its_text_has(given: Any, first: Any) -> None:
    system = turns(("system", [{"type": "text", "text": "s"}]))
    side = read_side({"input": given, "chosen": [*system, *turns(("user", first)), said("c")]}, KEYS, "chosen_key")
    assert [message["role"] for message in side.question] == ["system", "user"]
    assert list(side.images) == ["a.png"] * (first[0] == IMAGE)
    assert side.response == "c"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("b", "has a question of its own"),
        (turns(("user", [IMAGE, {"type": "text", "text": "a"}])), "has a question of its own"),  # its image
        (turns(("system", "t"), ("user", "a")), "different system messages"),
        (turns(("system", "s"), ("system", "s"), ("user", "a")), "different system messages"),
    ],
)
def test_a_question_that_differs_from_the_conversation_is_refused(given: Any, problem: str) -> None:
    row = {"input": given, "chosen": turns(("system", "s"), ("user", "a"), ("assistant", "c"))}
    with pytest.raises(UnusableError, match=problem):
        read_side(row, KEYS, "chosen_key")


def test_a_conversation_that_the_assistant_begins_continues_the_question() -> None:
    alone = read_side({"input": "a", "chosen": [said("b")]}, KEYS, "chosen_key")
    assert alone == ("a", (), "b")
    longer = turns(("system", "s"), ("assistant", "b"), ("tool", [IMAGE]), ("assistant", "c"))
    side = read_side({"input": "a", "chosen": longer}, KEYS, "chosen_key")
    tool = {"role": "tool", "content": [{"type": "image"}]}
    assert side == ([*turns(("system", "s"), ("user", "a"), ("assistant", "b")), tool], ["a.png"], "c")


def test_an_assistant_that_begins_may_be_asked_again() -> None:
    again = turns(("assistant", "b"), ("user", "c"), ("assistant", "d"))
    side = read_side({"input": "a", "chosen": again}, KEYS, "chosen_key")
    assert side == (turns(("user", "a"), ("assistant", "b"), ("user", "c")), [], "d")


def test_the_system_message_of_the_question_is_not_lost() -> None:
    row = {"input": turns(("system", "s"), ("user", "a")), "chosen": turns(("user", "a"), ("assistant", "b"))}
    assert read_side(row, KEYS, "chosen_key") == (turns(("system", "s"), ("user", "a")), (), "b")
    row["chosen"] = turns(("system", "other"), ("user", "a"), ("assistant", "b"))
    with pytest.raises(UnusableError, match="different system messages"):
        read_side(row, KEYS, "chosen_key")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"input": "a", "chosen": ""}, "empty response"),
        ({"input": "a", "chosen": " \n"}, "empty response"),
        ({"input": "a"}, "empty response"),
        ({"input": "a", "chosen": [said("")]}, "empty response"),
        ({"chosen": "b"}, "no question"),
        ({"chosen": [said("b")]}, "no question"),
        ({"input": "other", "chosen": turns(("user", "a"), ("assistant", "b"))}, "no question"),
        ({"chosen": turns(("user", "a"), ("assistant", [IMAGE]))}, "response unusable"),
        ({"chosen": turns(("user", "a"))}, "roles in a wrong order"),
    ],
)
def test_a_row_without_question_or_response_is_unusable(row: dict[str, Any], kind: str) -> None:
    with pytest.raises(UnusableError) as raised:
        read_side(row, KEYS, "chosen_key")
    assert raised.value.kind == kind


@pytest.mark.parametrize(
    "roles",
    [
        ["assistant", "user"],
        ["user", "user", "assistant"],
        ["user", "assistant", "assistant"],
        ["user", "system", "assistant"],
        ["system"],
    ],
)
def test_roles_in_a_wrong_order_are_refused(roles: list[str]) -> None:
    with pytest.raises(UnusableError, match=f"the roles {', '.join(roles)}; user and assistant should take turns"):
        check_roles(turns(*((role, "text") for role in roles)), "chosen")


@pytest.mark.parametrize(
    "roles",
    [
        ["user", "assistant"],
        ["system", "user", "assistant", "user", "assistant"],
        ["user", "assistant", "tool", "tool", "assistant"],
        ["assistant"],
    ],
)
def test_roles_in_order_pass(roles: list[str]) -> None:
    check_roles(turns(*((role, "text") for role in roles)), "chosen")


def test_margins_are_finite_numbers() -> None:
    assert read_margin({"gap": "1.5"}, "gap") == 1.5
    assert read_margin({"scores": {"gap": 2}}, "scores.gap") == 2.0
    assert read_margin({}, "gap") == read_margin({"gap": 3}, None) == 0.0
    for value in ("much", float("nan"), float("inf"), [1]):
        with pytest.raises(UnusableError, match="margin unusable"):
            read_margin({"gap": value}, "gap")
