from __future__ import annotations

import numpy as np

from vlmrl.observe.traces import MAX_TOKENS, Column, Tracer
from vlmrl.types import Bools, Floats, Group, Ints, Prompt, Rollout


def decode(tokens: Ints) -> str:
    """A tokenizer of bytes, with one special token, 0, that has no text."""
    return bytes(int(token) for token in tokens if token).decode(errors="replace")


def decode_pieces(tokens: Ints) -> str:
    """As SentencePiece: the space before a word is left out at the start of a text."""
    words = {1: " a", 2: " b", 3: "c"}
    return "".join(words[int(token)] for token in tokens).removeprefix(" ")


def response(text: bytes, *, prompt: int = 2) -> Rollout:
    tokens = np.array([9] * prompt + list(text))
    sampled: Bools = np.arange(len(tokens)) >= prompt
    logprobs: Floats = np.where(sampled, -0.123456, 0.0).astype(np.float32)
    return Rollout.of_response(tokens, sampled, logprobs, decode(tokens[prompt:]), "stop", 0)


def group(*texts: bytes) -> Group:
    empty = np.zeros(0, np.int64)
    return Group(Prompt(0, "toy:0", "p", empty, empty, None), tuple(response(text) for text in texts))


def test_the_group_whose_rewards_differ_most_is_traced_on_its_sampled_tokens() -> None:
    groups = [group(b"aa", b"bb"), group(b"cd", b"e\x00")]
    found = np.array([0, 0, 7, 8], np.float32)
    rewards = [np.array([0.5, 0.5]), np.array([0.0, 1.0])]
    advantages = [np.full(4, number, np.float32) for number in (1.0, 2.0, 3.0, 4.0000001)]
    columns: dict[str, Column | None] = {"advantage": advantages, "trainer": None, "value": lambda rows: {3: found}}
    assert Tracer(decode).traces(groups, rewards, columns) == {
        (1, 0): {"tokens": ["c", "d"], "logprob": [-0.123456, -0.123456], "advantage": [3.0, 3.0]},
        (1, 1): {"tokens": ["e", ""], "logprob": [-0.123456, -0.123456], "advantage": [4.0, 4.0], "value": [7.0, 8.0]},
    }


def test_a_character_of_several_tokens_is_with_the_last_of_them() -> None:
    assert Tracer(decode).texts(np.array(list("aé€b".encode()))) == ["a", "", "é", "", "", "€", "b"]


def test_bytes_that_are_no_character_stay_marks() -> None:
    texts = Tracer(decode).texts(np.array([0xFF, 0xFE, 97, 0xE2]))
    assert texts == ["\ufffd", "\ufffd", "a", "\ufffd"]


def test_spaces_that_depend_on_the_token_before_are_kept() -> None:
    assert Tracer(decode_pieces).texts(np.array([1, 2, 3, 1])) == ["a", " b", "c", " a"]


def test_extremes_come_first_until_the_limit() -> None:
    long = b"x" * (MAX_TOKENS // 2)
    groups, rewards = [group(long, long, long, b"y")], [np.array([0.5, 1.0, 0.0, np.nan])]
    assert list(Tracer(decode).traces(groups, rewards, {})) == [(0, 1), (0, 2)]
    assert Tracer(decode).traces([], [], {}) == {}


def test_a_figure_that_is_no_number_is_null() -> None:
    rows = [np.array([0.0, 0.0, np.nan, 2.0], np.float32)]
    (trace,) = Tracer(decode).traces([group(b"ab")], [np.array([1.0])], {"value": rows}).values()
    assert trace["value"] == [None, 2.0]
