"""Text and images of environments are measured before they are tokenized, resized and stored."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import scripted_policy
from agents.scripted_policy import CALL, SAMPLING, played, stops

from vlmrl.agents import contents
from vlmrl.agents.contents import Contents
from vlmrl.config.data import Columns
from vlmrl.data.media import InlineMedia, make_row_media
from vlmrl.plugins import Processor
from vlmrl.processors.text import TextProcessor
from vlmrl.types import Ints

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leftover_processes")]


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, threading.Thread]]:
    """The number of characters of each text that is tokenized, and its thread."""
    texts: list[tuple[int, threading.Thread]] = []
    original = TextProcessor.token_ids

    def token_ids(self: TextProcessor, text: str) -> Ints:
        texts.append((len(text), threading.current_thread()))
        return original(self, text)

    monkeypatch.setattr(TextProcessor, "token_ids", token_ids)
    return texts


@pytest.fixture
def long_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses have room for two calls."""
    monkeypatch.setattr(scripted_policy, "SAMPLING", replace(SAMPLING, max_new_tokens=300))


async def test_feedback_that_cannot_fit_is_not_tokenized(
    games: Path, chat: Processor, tokenized: list[tuple[int, threading.Thread]]
) -> None:
    group, _ = await played(games, "Game", chat, [["one", "epic"], ["stop"]])
    assert stops(group) == ["context", "done"]
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 2.0]
    assert max(length for length, _ in tokenized) < 1000


@pytest.mark.usefixtures("long_responses")
async def test_the_results_of_a_response_are_limited_together(
    games: Path, chat: Processor, tokenized: list[tuple[int, threading.Thread]]
) -> None:
    calls = CALL % ("log", '{"n": 600000}') * 2
    group, _ = await played(games, "Hoard", chat, [[calls], ["stop"]], context_len=10**6)
    assert stops(group) == ["context", "done"]
    assert [turn.reward for turn in group.rollouts[0].turns] == [2.0], "both calls are made"
    assert max(length for length, _ in tokenized) < 10_000


async def test_a_first_message_that_cannot_fit_is_not_tokenized(
    games: Path, chat: Processor, tokenized: list[tuple[int, threading.Thread]]
) -> None:
    group, _ = await played(games, "Epic", chat, [["stop"], ["stop"]])
    episode = group.rollouts[0].episode
    assert episode is not None
    assert "the first observation has 900000 characters and 0 images" in str(episode.problem)
    assert max(length for length, _ in tokenized) < 1000


async def test_long_feedback_is_tokenized_beside_the_event_loop_to_the_same_tokens(
    games: Path,
    chat: Processor,
    tokenized: list[tuple[int, threading.Thread]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = [["one", "essay", "essay", "stop"], ["essay", "stop"]]
    group, _ = await played(games, "Game", chat, script, context_len=30_000)
    threads = {(length > 5000, thread.name) for length, thread in tokenized}
    loop = threading.current_thread().name
    assert threads == {(False, loop), (True, "vlmrl-tokenizer_0")}
    monkeypatch.setattr(contents, "LONG_CHARS", 10**9)
    tokenized.clear()
    inline, _ = await played(games, "Game", chat, script, context_len=30_000)
    assert {thread.name for _, thread in tokenized} == {loop}
    assert stops(group) == stops(inline) == ["done", "done"]
    for ours, theirs in zip(group.rollouts, inline.rollouts, strict=True):
        assert ours.segments[0].tokens.tolist() == theirs.segments[0].tokens.tolist()


async def test_the_thread_has_a_tokenizer_of_its_own(chat: Processor) -> None:
    converted = Contents(chat, columns=Columns(), context_len=100, share=lambda image: image)
    assert await converted.tokenize(10, lambda processor: processor) is chat
    other = await converted.tokenize(10_000, lambda processor: processor)
    assert other.tokenizer is not chat.tokenizer
    messages: Sequence[Mapping[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "é <|im_end|> <image>"}]}
    ]
    ours, theirs = (one.bridge(messages, [], last_token=None)[0] for one in (chat, other))
    assert ours.tolist() == theirs.tolist()


@pytest.mark.usefixtures("long_responses")
@pytest.mark.parametrize(
    ("script", "stop", "num_stored"),
    [
        (["gallery"], "images", 0),
        ([CALL % ("album", '{"n": 3}') + CALL % ("album", '{"n": 2}')], "images", 3),
        ([CALL % ("album", '{"n": 3}'), "look", "look", "stop"], "images", 4),
    ],
)
async def test_images_are_counted_before_they_are_stored(
    games: Path,
    vlm: Processor,
    script: list[str],
    stop: str,
    num_stored: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = _count_stored(monkeypatch)
    group, _ = await played(games, "Hoard", vlm, [script, ["stop"]], max_images=4)
    assert stops(group) == [stop, "done"]
    assert len(stored) == num_stored


async def test_images_of_a_first_message_are_counted_before_they_are_stored(
    games: Path, vlm: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = _count_stored(monkeypatch)
    group, _ = await played(games, "Gallery", vlm, [["stop"], ["stop"]])
    assert stops(group) == ["failed", "failed"]
    assert stored == []


def _count_stored(monkeypatch: pytest.MonkeyPatch) -> list[InlineMedia]:
    stored: list[InlineMedia] = []

    def make_row_media_and_count(*arguments: Any, **settings: Any) -> tuple[InlineMedia, ...]:
        images = make_row_media(*arguments, **settings)
        stored.extend(images)
        return images

    monkeypatch.setattr(contents, "make_row_media", make_row_media_and_count)
    return stored
