"""Tool calls of a policy in its episodes."""

from pathlib import Path

import pytest
from agents.scripted_policy import CALL, messages, played, stops
from chat_templates import MISTRAL, text_processor

from vlmrl.plugins import Processor

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_processes", "no_leftover_processes")]


async def test_tools_and_their_errors(games: Path) -> None:
    one = text_processor("qwen3")
    calls = [
        "I count. " + CALL % ("double", '{"x": 4}'),
        CALL % ("double", '{"x": 1}') + CALL % ("fails", "{}"),
        CALL % ("triple", "{}"),
        CALL % ("double", '{"x": "four"}'),
        '<tool_call>{"name": ',
        "stop",
    ]
    group, _ = await played(games, "Tools", one, [calls, [CALL % ("leaves", "{}")]])
    assert "Twice x." in group.prompt.text
    assert stops(group) == ["done", "done"]
    episode, other = (rollout.episode for rollout in group.rollouts)
    assert episode is not None
    assert other is not None
    assert (episode.tool_calls, episode.tool_errors) == (6, 4)
    assert (other.tool_calls, other.tool_errors) == (1, 0)
    assert [turn.reward for turn in group.rollouts[0].turns] == [0.125, 0.125, 0.0, 0.0, 0.0, 0.5]
    assert [turn.reward for turn in group.rollouts[1].turns] == [4.0]
    said = [text for role, text in messages(group, 0) if role == "tool"]
    assert said[:2] == ["8", "2"]
    assert "not today" in said[2]
    assert "there is no tool triple" in said[3]
    assert "x" in said[4]
    assert "could not be parsed" in said[5]


async def test_calls_in_thinking_that_the_prompt_began_are_not_made(games: Path) -> None:
    one = text_processor("thinking")
    call = CALL % ("leaves", "{}")
    group, _ = await played(games, "Tools", one, [[f"maybe {call} but...", f"yes</think>{call}"], ["stop"]])
    assert group.prompt.text.endswith("<think>\n")
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.tool_calls, episode.tool_errors) == ("done", 1, 0)
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 4.0]


async def test_calls_behind_one_that_ends_the_episode_are_not_made(games: Path) -> None:
    calls = CALL % ("leaves", "{}") + CALL % ("fails", "{}")
    group, _ = await played(games, "Tools", text_processor("qwen3"), [[calls], ["stop"]])
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.tool_calls, episode.tool_errors) == ("done", 1, 0)
    assert [turn.reward for turn in group.rollouts[0].turns] == [4.0]


async def test_tools_are_not_called_in_the_last_turn(games: Path) -> None:
    script = [["one", CALL % ("leaves", "{}")], ["one", "stop"]]
    group, _ = await played(games, "Tools", text_processor("qwen3"), script, max_turns=2)
    assert stops(group) == ["turns", "done"], "nobody would read the result"
    assert group.rollouts[0].turns[-1].reward == 0.0


async def test_a_picture_of_a_tool_reaches_the_policy(games: Path, vlm: Processor) -> None:
    script = [[CALL % ("picture", '{"x": 7}'), "stop"], ["stop"]]
    group, policy = await played(games, "Tools", vlm, script)
    (segment,) = group.rollouts[0].segments
    assert len(segment.media) == 1
    assert segment.media[0].fetch()[0, 0].tolist() == [7, 0, 0]
    assert policy.seen[0, 0, 1][0].media == segment.media


async def test_a_call_that_cannot_be_parsed_is_told_in_templates_that_want_the_id_of_a_call(games: Path) -> None:
    one = text_processor("mistral")
    assert one.tokenizer.chat_template == MISTRAL
    group, _ = await played(games, "Tools", one, [['<tool_call>{"name": ', "stop"], ["stop"]])
    assert stops(group) == ["done", "done"]
