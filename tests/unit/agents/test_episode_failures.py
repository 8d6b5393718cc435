"""Environments that raise, hang, die, or cannot begin."""

import asyncio
from pathlib import Path

import pytest
from agents.scripted_policy import SAMPLING, ScriptedPolicy, messages, play, played, row, stops
from agents.user_environments import environments

from vlmrl.agents.episodes import Player
from vlmrl.config.agent import Agent
from vlmrl.config.data import Columns
from vlmrl.data.responses import to_samples
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.plugins import Processor
from vlmrl.types import Group, Prompt, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_processes", "no_leftover_processes")]


@pytest.mark.parametrize(("make", "response"), [("Album", "stop"), ("Game", "look")])
async def test_an_image_for_a_text_model_ends_the_run(games: Path, chat: Processor, make: str, response: str) -> None:
    with pytest.raises(ConfigError, match="the environment returned an image, but the model takes text only"):
        await played(games, make, chat, [[response, "stop"]] * 2)


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("raise", "RuntimeError: no such move"),
        ("nan", "reward"),
        ("bomb", "30000"),
    ],
)
async def test_an_environment_that_raises_or_returns_nonsense_ends_the_episode_as_the_responses_doing(
    games: Path, chat: Processor, response: str, problem: str
) -> None:
    group, policy = await played(games, "Game", chat, [["one", response], ["one", "two", "stop"]])
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.failure, len(episode.retried)) == ("raised", "response", 0)
    assert episode.problem is not None
    assert problem in episode.problem
    assert "\n" not in episode.problem
    assert group.rollouts[0].finish_reason == "stop"
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 0.0]
    assert stops(group)[1] == "done"
    alone, _ = await played(games, "Game", chat, [["stop"], ["one", "two", "stop"]])
    ours, theirs = group.rollouts[1].segments[0], alone.rollouts[1].segments[0]
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.logprobs.tolist() == theirs.logprobs.tolist()
    assert {turn for turn in policy.seen if turn[0] == 1} == {(1, 0, 0), (1, 0, 1), (1, 0, 2)}


@pytest.mark.parametrize(("response", "timeouts"), [("sleep", 1), ("exit", 0), ("offline", 0)])
async def test_an_episode_that_is_lost_is_played_again_with_other_responses(
    games: Path, chat: Processor, response: str, timeouts: int
) -> None:
    def script(episode: int, attempt: int, turn: int) -> str:
        if episode == 1:
            return ("one", "two", "stop")[turn]
        return ("first", response)[turn] if attempt == 0 else ("again", "seed", "stop")[turn]

    group, policy = await played(games, "Game", chat, script, step_limit_s=3.0)
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.failure, len(episode.retried), episode.timeouts) == ("done", None, 1, timeouts)
    reasons = {"sleep": "step took longer than", "exit": "its process ended", "offline": "no route"}
    assert reasons[response] in episode.retried[0]
    assert episode.env_s > (3.0 if response == "sleep" else 0.0), "the time of lost attempts counts"
    assert messages(group, 0)[0] == ("assistant", "again")
    assert ("user", str(SAMPLING.request_seed(3) % 2**32)) in messages(group, 0), "the environment has the same seed"
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 1.0, 0.5]
    assert policy.seen[0, 0, 0][0].tokens.tolist() == policy.seen[0, 1, 0][0].tokens.tolist()
    other = group.rollouts[1].episode
    assert other is not None
    assert (len(other.retried), len(group.rollouts[1].turns)) == (0, 3), "the other episode went on"


@pytest.mark.parametrize("response", ["wait", "exit"])
async def test_asynchronous_episodes_in_a_process_that_dies_are_all_played_again(
    games: Path, chat: Processor, response: str
) -> None:
    def script(episode: int, attempt: int, turn: int) -> str:
        return "stop" if turn == 2 else response if (episode, attempt, turn) == (0, 0, 1) else f"{attempt}"

    policy = ScriptedPolicy(chat, script, SAMPLING)
    async with environments(games, "AsyncGame", num_workers=1, step_limit_s=3.0) as made:
        group = await play(made, policy)
    assert stops(group) == ["done", "done"]
    first, second = (rollout.episode for rollout in group.rollouts)
    assert first is not None
    assert second is not None
    assert (len(first.retried), first.timeouts) == (1, response == "wait")
    if response == "wait":
        assert len(second.retried) == 0, "a call that waits is cancelled, and takes no other with it"
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3]


@pytest.mark.parametrize("response", ["sleep", "exit"])
async def test_an_episode_that_is_lost_again_and_again_has_failed(games: Path, chat: Processor, response: str) -> None:
    group, _ = await played(games, "Game", chat, [["one", response], ["one", "stop"]], step_limit_s=2.0)
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.failure, len(episode.retried)) == ("failed", "infrastructure", 1)
    assert episode.timeouts == 2 * (response == "sleep")
    assert episode.problem
    (segment,) = group.rollouts[0].segments
    assert segment.tokens.tolist() == group.prompt.tokens.tolist()
    assert not segment.sampled.any()
    assert stops(group)[1] == "done"
    failed, whole = to_samples([group])
    assert failed.prompt_length == whole.prompt_length, "it shares the prompt of its group"


async def test_calls_that_take_too_long_together_are_a_timeout(games: Path, chat: Processor) -> None:
    group, policy = await played(games, "Game", chat, [["nap"] * 9, ["stop"]], episode_limit_s=1.0, max_retries=0)
    assert (0, 0, 2) not in policy.seen, "no response is sampled for an episode without time"
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.timeouts, len(episode.retried)) == ("failed", 1, 0)
    assert "agent.episode_limit_s 1 s" in str(episode.problem)


@pytest.mark.parametrize(("last", "stop", "reward"), [("late stop", "done", 0.5), ("nap", "turns", 1.0)])
async def test_an_episode_that_ends_in_time_for_its_last_call_counts(
    games: Path, chat: Processor, last: str, stop: str, reward: float
) -> None:
    limits = {"max_turns": 2, "episode_limit_s": 0.5, "max_retries": 0}
    group, _ = await played(games, "Game", chat, [["one", last], ["one", "stop"]], **limits)
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.timeouts, episode.failure) == (stop, 0, None)
    assert episode.env_s > 0.5
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, reward]


async def test_an_episode_that_finds_no_free_process_in_time_stops_the_run(games: Path, chat: Processor) -> None:
    async def never_ends(prompt: Prompt, sampling: Sampling) -> Group:
        await asyncio.sleep(1000)
        raise AssertionError

    async with environments(games, "Game", num_workers=1, wait_limit_s=0.5) as made:
        player = Player(
            settings=Agent(),
            environments=made,
            tools=(),
            parser=None,
            processor=chat,
            columns=Columns(),
            sample=never_ends,
            share=lambda image: image,
        )
        with pytest.raises(
            ClusterError, match=r"^toy:3 waits for an environment, and none of the 1 episodes that play"
        ):
            await player.play(row(chat), SAMPLING)


@pytest.mark.parametrize(("make", "what"), [("Fickle", "texts"), ("FickleAlbum", "images")])
async def test_different_first_observations_of_a_group_are_an_error(
    games: Path, vlm: Processor, make: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=f"two episodes of toy:3 with the same seed began with different {what}"):
        await played(games, make, vlm, [["stop"], ["stop"]])


@pytest.mark.parametrize("make", ["Row", "Nothing"])
async def test_a_row_without_a_question_needs_a_first_message(games: Path, chat: Processor, make: str) -> None:
    policy = ScriptedPolicy(chat, lambda e, a, t: "stop", SAMPLING)
    async with environments(games, make, num_workers=2) as made:
        with pytest.raises(ConfigError, match=r"reset returned None, for the row's own prompt, but the rows of this"):
            await play(made, policy, prompt=row(chat, has_question=False))
    assert not policy.seen


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        ("Closed", "reset: KeyError: 'level'"),
        ("LongStart", "agent.context_len 2000"),
    ],
)
async def test_an_environment_that_cannot_begin_has_failed(
    games: Path, chat: Processor, make: str, problem: str
) -> None:
    group, policy = await played(games, make, chat, [["stop"], ["stop"]])
    assert stops(group) == ["failed", "failed"]
    assert not policy.seen
    for rollout in group.rollouts:
        assert rollout.episode is not None
        assert (rollout.episode.failure, len(rollout.episode.retried)) == ("infrastructure", 1)
        assert problem in str(rollout.episode.problem)
    assert group.prompt.tokens.tolist() == row(chat).tokens.tolist()
