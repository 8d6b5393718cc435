"""Episodes of a scripted policy with environments in real processes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents.user_environments import environments
from chat_templates import MISTRAL, text_processor
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vlmrl.agents.environments import Environments
from vlmrl.agents.episodes import Player
from vlmrl.agents.tool_calls import ToolCallParser, as_function
from vlmrl.config.agent import Agent
from vlmrl.config.data import Columns
from vlmrl.data.responses import to_samples
from vlmrl.errors import ConfigError
from vlmrl.models.tiny import build
from vlmrl.plugins import Processor, processor
from vlmrl.rollout.tool_parsers import vllm_tool_parser
from vlmrl.types import ChatMessage, Group, Prompt, Rollout, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leftover_processes")]

GAMES = '''
import asyncio, os, time

from PIL import Image

from vlmrl.agents import Reply, tool


class Game:
    """Does what the response says."""

    def reset(self, row, seed):
        self.seed, self.count = seed, 0
        return f"seed {seed}"

    def step(self, response):
        self.count += 1
        if response == "stop":
            return Reply(done=True, reward=0.5)
        if response == "raise":
            raise RuntimeError("no such move")
        if response == "offline":
            raise ConnectionError("no route")
        if response == "sleep":
            time.sleep(1000)
        if response == "exit":
            os._exit(3)
        if response == "nan":
            return Reply("x", reward=float("nan"))
        if response == "bomb":
            return Reply(Image.new("L", (30_000, 30_000)))
        if response == "nap":
            time.sleep(0.6)
        if response == "look":
            return Reply([Image.new("RGB", (56, 56), (self.count, 0, 9)), "left or right?"], reward=0.25)
        if response == "long":
            return Reply("very long " * 100, reward=2)
        if response == "seed":
            return Reply(str(self.seed), reward=1)
        return Reply(f"you said {response}", reward=1)


class AsyncGame(Game):
    async def step(self, response):
        if response == "wait":
            await asyncio.sleep(1000)
        return Game.step(self, response)


class Tools(Game):
    @tool
    def double(self, x: int):
        """Twice x."""
        return Reply(str(2 * x), reward=0.125)

    @tool
    def picture(self, x: int) -> Image.Image:
        """A picture."""
        return Image.new("RGB", (56, 56), (x, 0, 0))

    @tool
    def fails(self):
        """Raise."""
        raise ValueError("not today")

    @tool
    def leaves(self):
        """Leave."""
        return Reply(done=True, reward=4)


class Row(Game):
    """The first message is the prompt of the row."""

    def reset(self, row, seed):
        self.seed, self.count = seed, 0


class Album(Game):
    def reset(self, row, seed):
        self.seed, self.count = seed, 0
        return [Image.new("RGB", (56, 56), (seed % 251, 1, 1)), "Where?"]


class Fickle(Game):
    def reset(self, row, seed):
        self.count = 0
        return f"at {time.monotonic_ns()}"


class FickleAlbum(Game):
    def reset(self, row, seed):
        self.count = 0
        return [Image.new("RGB", (56, 56), tuple(os.urandom(3))), "Where?"]


class Closed(Game):
    def reset(self, row, seed):
        raise KeyError("level")


class LongStart(Game):
    def reset(self, row, seed):
        return "x" * 2000
'''

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SAMPLING = Sampling(n=2, temperature=1.0, top_p=1.0, max_new_tokens=100, seed=11)
Script = Callable[[int, int, int], str]
"""(episode, attempt, turn) -> the response. `...` at its end: it is cut there."""


@dataclass
class ScriptedPolicy:
    """Responds by a script, and keeps what it sampled."""

    processor: Processor
    script: Script
    sampling: Sampling
    seen: dict[tuple[int, int, int], tuple[Prompt, Sampling]] = field(default_factory=dict)
    sampled: dict[tuple[int, int], list[tuple[int, float, int]]] = field(default_factory=dict)
    """(episode, attempt) -> (token, log-prob, version) in the order of sampling."""

    def __post_init__(self) -> None:
        turns = [(e, a, t) for e in range(self.sampling.n) for a in range(4) for t in range(20)]
        seeds = [
            self.sampling.of_turn(episode=e, attempt=a, turn=t, max_new_tokens=1).request_seed(3) for e, a, t in turns
        ]
        assert len(set(seeds)) == len(turns), "each response has a seed of its own"
        self._turns = dict(zip(seeds, turns, strict=True))

    async def __call__(self, prompt: Prompt, sampling: Sampling) -> Group:
        turn = self._turns[sampling.request_seed(prompt.index)]
        assert turn not in self.seen, "a response is sampled once"
        assert sampling.n == 1
        self.seen[turn] = prompt, sampling
        text = self.script(*turn)
        response = self.processor.tokenizer(text.removesuffix("..."), add_special_tokens=False).input_ids
        if not text.endswith("..."):
            response.append(self.processor.eos_token_ids[0])
        is_cut = text.endswith("...") or len(response) > sampling.max_new_tokens
        response = response[: sampling.max_new_tokens]
        noise = np.random.default_rng(turn)
        logprobs = (-noise.random(len(response))).astype(np.float32)
        version = 5 + turn[2]
        self.sampled.setdefault(turn[:2], []).extend(
            (token, float(p), version) for token, p in zip(response, logprobs, strict=True)
        )
        tokens = np.concatenate([prompt.tokens, np.array(response, dtype=np.int64)])
        sampled = np.arange(len(tokens)) >= len(prompt.tokens)
        rollout = Rollout.of_response(
            tokens,
            sampled,
            np.concatenate([np.zeros(len(prompt.tokens), np.float32), logprobs]),
            self.processor.decode(np.array(response)),
            "length" if is_cut else "stop",
            version,
            prompt.media,
        )
        return Group(prompt, (rollout,))


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "games.py"
    path.write_text(GAMES)
    return path


@pytest.fixture(scope="module")
def chat() -> Processor:
    return text_processor("chatml")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro")
    return processor(str(folder), min_pixels=784, max_pixels=150_000)


def row(one: Processor, **changes: Any) -> Prompt:
    text = one.render("What is it?", num_images=0, columns=Columns())
    tokens, request = one.encode(text, [])
    return Prompt(
        **{"index": 3, "source": "toy:3", "text": text, "tokens": tokens, "request": request, "label": "right"}
        | {"question": "What is it?", "label_key": "label"}
        | changes
    )


async def play(
    made: Environments,
    policy: ScriptedPolicy,
    *,
    tools: Sequence[Any] = (),
    **settings: Any,
) -> Group:
    one = policy.processor
    functions = [as_function(tool) for tool in tools]
    parser = ToolCallParser(one, vllm_tool_parser("hermes", one.tokenizer, functions), "hermes") if tools else None
    player = Player(
        settings=Agent(**{"context_len": 2000, "max_retries": 1} | settings),
        environments=made,
        tools=tuple(tools),
        parser=parser,
        processor=one,
        columns=Columns(),
        sample=policy,
        share=lambda image: image,
    )
    group = await player.play(row(one), policy.sampling)
    check(policy, group)
    return group


def check(policy: ScriptedPolicy, group: Group) -> None:
    """Each token that was sampled in the last attempt of an episode is trained once, as it was sampled."""
    for number, rollout in enumerate(group.rollouts):
        episode = rollout.episode
        assert episode is not None
        trained = [
            (int(t), float(p), int(v))
            for s in rollout.segments
            for t, p, v in zip(s.tokens[s.sampled], s.logprobs[s.sampled], s.versions[s.sampled], strict=True)
        ]
        last = max((attempt for e, attempt, _ in policy.seen if e == number), default=0)
        assert trained == ([] if episode.stop == "failed" else policy.sampled.get((number, last), []))
        first = rollout.segments[0]
        assert first.tokens[: len(group.prompt.tokens)].tolist() == group.prompt.tokens.tolist()
        said = [message.reward for message in episode.messages if message.role == "assistant"]
        assert said == [turn.reward for turn in rollout.turns]


async def played(
    games: Path,
    make: str,
    one: Processor,
    script: Script | Sequence[Sequence[str]],
    *,
    step_limit_s: float = 20.0,
    **settings: Any,
) -> tuple[Group, ScriptedPolicy]:
    """Play two episodes of `make`. A script by lists has the responses of each episode, whatever the attempt."""
    lists = () if callable(script) else script
    policy = ScriptedPolicy(one, script if callable(script) else lambda e, a, t: lists[e][t], SAMPLING)
    async with environments(games, make, num_workers=2, step_limit_s=step_limit_s) as made:
        group = await play(made, policy, tools=made._tools, **settings)
    return group, policy


def messages(group: Group, number: int) -> list[tuple[str, str]]:
    episode = group.rollouts[number].episode
    assert episode is not None
    return [(message.role, message.text) for message in episode.messages]


def stops(group: Group) -> list[str]:
    return [rollout.episode.stop for rollout in group.rollouts if rollout.episode is not None]


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


@pytest.mark.parametrize(("make", "response"), [("Album", "stop"), ("Game", "look")])
async def test_an_image_for_a_text_model_ends_the_run(games: Path, chat: Processor, make: str, response: str) -> None:
    with pytest.raises(ConfigError, match="the environment returned an image, but the model takes text only"):
        await played(games, make, chat, [[response, "stop"]])


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
    assert (episode.stop, episode.failure, episode.retries) == ("raised", "response", 0)
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
    assert (episode.stop, episode.failure, episode.retries, episode.timeouts) == ("done", None, 1, timeouts)
    assert messages(group, 0)[0] == ("assistant", "again")
    assert ("user", str(SAMPLING.request_seed(3) % 2**32)) in messages(group, 0), "the environment has the same seed"
    assert [turn.reward for turn in group.rollouts[0].turns] == [1.0, 1.0, 0.5]
    assert policy.seen[0, 0, 0][0].tokens.tolist() == policy.seen[0, 1, 0][0].tokens.tolist()
    other = group.rollouts[1].episode
    assert other is not None
    assert (other.retries, len(group.rollouts[1].turns)) == (0, 3), "the other episode went on"


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
    assert (first.retries, first.timeouts) == (1, response == "wait")
    if response == "wait":
        assert second.retries == 0, "a call that waits is cancelled, and takes no other with it"
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3]


@pytest.mark.parametrize("response", ["sleep", "exit"])
async def test_an_episode_that_is_lost_again_and_again_has_failed(games: Path, chat: Processor, response: str) -> None:
    group, _ = await played(games, "Game", chat, [["one", response], ["one", "stop"]], step_limit_s=2.0)
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.failure, episode.retries) == ("failed", "infrastructure", 1)
    assert episode.timeouts == 2 * (response == "sleep")
    assert episode.problem
    (segment,) = group.rollouts[0].segments
    assert segment.tokens.tolist() == group.prompt.tokens.tolist()
    assert not segment.sampled.any()
    assert stops(group)[1] == "done"
    failed, whole = to_samples([group])
    assert failed.prompt_length == whole.prompt_length, "it shares the prompt of its group"


async def test_calls_that_take_too_long_together_are_a_timeout(games: Path, chat: Processor) -> None:
    group, _ = await played(games, "Game", chat, [["nap"] * 9, ["stop"]], episode_limit_s=1.0, max_retries=0)
    episode = group.rollouts[0].episode
    assert episode is not None
    assert (episode.stop, episode.timeouts, episode.retries) == ("failed", 1, 0)
    assert "agent.episode_limit_s 1 s" in str(episode.problem)


@pytest.mark.parametrize(("make", "what"), [("Fickle", "texts"), ("FickleAlbum", "images")])
async def test_different_first_observations_of_a_group_are_an_error(
    games: Path, vlm: Processor, make: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=f"two episodes of toy:3 with the same seed began with different {what}"):
        await played(games, make, vlm, [["stop"], ["stop"]])


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
        assert (rollout.episode.failure, rollout.episode.retries) == ("infrastructure", 1)
        assert problem in str(rollout.episode.problem)
    assert group.prompt.tokens.tolist() == row(chat).tokens.tolist()


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
    max_examples=15,
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
