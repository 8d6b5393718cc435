"""Turns, rewards and the end of episodes; each sampled token is trained once."""

import asyncio
from pathlib import Path

import pytest
from agents.scripted_policy import CALL, SAMPLING, ScriptedPolicy, messages, play, played, row, stops
from agents.user_environments import environments
from chat_templates import text_processor
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vlmrl.config.data import Columns
from vlmrl.data.responses import to_samples
from vlmrl.plugins import Processor
from vlmrl.types import ChatMessage, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_processes", "no_leftover_processes")]


async def test_turns_rewards_and_messages(games: Path, chat: Processor) -> None:
    group, policy = await played(games, "Game", chat, [["one", "two", "stop"], ["stop"]])
    seed = SAMPLING.request_seed(3) % 2**32
    first = chat.render([{"role": "user", "content": f"seed {seed}"}], num_images=0, columns=Columns())
    assert group.prompt.text == chat.readable(first)
    assert (group.prompt.index, group.prompt.source, group.prompt.label) == (3, "toy:3", "right")
    assert stops(group) == ["done", "done"]
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 1.0, 0.5]
    assert messages(group, 0) == [
        ("assistant", "one"),
        ("user", "you said one"),
        ("assistant", "two"),
        ("user", "you said two"),
        ("assistant", "stop"),
    ]
    assert group.prompt.messages == (ChatMessage("user", (f"seed {seed}",)),)
    between = "<|im_end|>\n<|im_start|>user\nyou said %s<|im_end|>\n<|im_start|>assistant\n"
    assert [rollout.episode.rendered for rollout in group.rollouts if rollout.episode] == [
        f"{group.prompt.text}one{between % 'one'}two{between % 'two'}stop",
        f"{group.prompt.text}stop",
    ]
    assert [rollout.text for rollout in group.rollouts] == ["stop", "stop"]
    assert [rollout.finish_reason for rollout in group.rollouts] == ["stop", "stop"]
    assert group.rollouts[0].versions == (5, 6, 7)
    (segment,) = group.rollouts[0].segments
    second = policy.seen[0, 0, 1][0]
    assert segment.tokens[: len(second.tokens)].tolist() == second.tokens.tolist(), "the history is as sampled"
    assert chat.decode(segment.tokens).startswith(chat.decode(group.prompt.tokens))


async def test_without_an_observation_the_first_message_is_the_rows_prompt(games: Path, chat: Processor) -> None:
    group, _ = await played(games, "Row", chat, [["one", "stop"], ["seed", "stop"]])
    assert group.prompt.tokens.tolist() == row(chat).tokens.tolist()
    assert messages(group, 1)[1] == ("user", str(SAMPLING.request_seed(3) % 2**32))


async def test_the_last_turn_ends_the_episode_with_its_reward(games: Path, chat: Processor) -> None:
    group, _ = await played(games, "Game", chat, [["one", "two"], ["one", "stop"]], max_turns=2)
    assert stops(group) == ["turns", "done"]
    assert [rollout.finish_reason for rollout in group.rollouts] == ["length", "stop"]
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 1.0]
    assert messages(group, 0)[-1] == ("assistant", "two")


async def test_feedback_beyond_the_context_ends_the_episode_before_any_of_it_is_added(
    games: Path, chat: Processor
) -> None:
    group, policy = await played(games, "Game", chat, [["one", "long"], ["one", "stop"]], context_len=200)
    assert stops(group) == ["context", "done"]
    assert [rollout.finish_reason for rollout in group.rollouts] == ["length", "stop"]
    (segment,) = group.rollouts[0].segments
    assert segment.turns[-1].end == len(segment.tokens)
    assert segment.turns[-1].reward == 2.0
    for prompt, sampling in policy.seen.values():
        assert sampling.max_new_tokens == min(100, 200 - len(prompt.tokens))


async def test_a_response_is_never_longer_than_the_context(games: Path, chat: Processor) -> None:
    group, policy = await played(games, "Game", chat, [["a" * 60, "b" * 90], ["stop"]], context_len=250)
    (segment,) = group.rollouts[0].segments
    assert len(segment.tokens) == 250
    assert policy.seen[0, 0, 1][1].max_new_tokens == segment.turns[1].end - segment.turns[1].start < 90
    assert group.rollouts[0].finish_reason == "length"
    assert stops(group)[0] == "context"


async def test_a_cut_response_is_passed_on_and_its_end_is_not_trained(games: Path, chat: Processor) -> None:
    group, _ = await played(games, "Game", chat, [["half...", "stop"], ["half..."] * 2], max_turns=2)
    (segment,) = group.rollouts[0].segments
    first, _ = segment.turns
    assert segment.tokens[first.end] == chat.eos_token_ids[0]
    assert not segment.sampled[first.end]
    assert messages(group, 0)[:2] == [("assistant", "half"), ("user", "you said half")]
    assert [rollout.finish_reason for rollout in group.rollouts] == ["stop", "length"]


async def test_images_of_all_turns_and_their_limit(games: Path, vlm: Processor) -> None:
    group, policy = await played(games, "Album", vlm, [["look", "look", "stop"], ["look", "a", "look"]], max_images=2)
    assert stops(group) == ["images", "images"]
    (segment,) = group.rollouts[0].segments
    assert len(group.prompt.media) == 1
    assert [len(s.media) for rollout in group.rollouts for s in rollout.segments] == [2, 2]
    assert segment.media[0].hash == group.prompt.media[0].hash
    count = sum(vlm.num_tokens(item.size) for item in segment.media)
    assert int((vlm.token_types(segment.tokens) == 1).sum()) == count
    episode = group.rollouts[0].episode
    assert episode is not None
    assert [message.media for message in episode.messages] == [(), segment.media[1:2], ()]
    assert episode.messages[1].text == "<image>left or right?"
    assert episode.rendered.startswith(group.prompt.text)
    assert episode.rendered.count("<|vision_start|><|image_pad|><|vision_end|>") == 2
    assert [message.media for message in group.prompt.messages][-1] == group.prompt.media
    prompt = policy.seen[0, 0, 1][0]
    assert (prompt.request == vlm.tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum() == 2


@pytest.mark.parametrize("history", ["keep", "template"])
async def test_a_rewritten_history_opens_segments(games: Path, history: str) -> None:
    one = text_processor("qwen3")
    thought = "<think>\nhm\n</think>\n\n"
    script = [[thought + "one", thought + "two", "stop"], ["stop"]]
    group, policy = await played(games, "Game", one, script, history=history)
    segments = group.rollouts[0].segments
    assert len(segments) == (1 if history == "keep" else 3)
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 1.0, 0.5]
    third = one.tokenizer.decode(policy.seen[0, 0, 2][0].tokens)
    assert third.count("assistant\n<think>\nhm") == (2 if history == "keep" else 0)
    episode = group.rollouts[0].episode
    assert episode is not None
    assert episode.rendered == third + "stop", "it is what the policy read last"
    samples = to_samples([group])
    assert [sample.response for sample in samples] == [0] * len(segments) + [1]
    assert samples[0].length_of_response == group.rollouts[0].num_sampled


_RESPONSES = st.sampled_from(
    [
        *("stop", "one", "a cut...", "look", "long", "raise", "nan", "offline", "", "..."),
        *("<think>\nhm\n</think>\n\nso", "<tool_call>{", CALL % ("double", '{"x": 4}')),
        *(CALL % ("fails", "{}"), CALL % ("picture", '{"x": 4}')),
    ]
)


@hypothesis_settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    scripts=st.lists(st.lists(_RESPONSES, min_size=1, max_size=5), min_size=2, max_size=4),
    history=st.sampled_from(["keep", "template"]),
    make=st.sampled_from(["Tools", "Album", "Row"]),
    max_images=st.integers(1, 3),
    context_len=st.sampled_from([420, 900]),
)
def test_every_sampled_token_of_any_episodes_is_trained_once(
    games: Path, vlm: Processor, scripts: list[list[str]], history: str, make: str, max_images: int, context_len: int
) -> None:
    def script(episode: int, attempt: int, turn: int) -> str:
        return (scripts[(episode + attempt) % len(scripts)] + ["stop"] * 9)[turn]

    async def run() -> None:
        policy = ScriptedPolicy(vlm, script, Sampling(len(scripts), 1.0, 1.0, 60, seed=11))
        async with environments(games, make, num_workers=2) as made:
            limits = {"max_images": max_images, "context_len": context_len, "max_turns": 5}
            group = await play(made, policy, tools=made._tools, history=history, **limits)
        for rollout in group.rollouts:
            assert max(len(segment.tokens) for segment in rollout.segments) <= context_len
            assert max(len(segment.media) for segment in rollout.segments) <= max_images

    asyncio.run(run())
