"""Whole conversations reach functions and servers as plain messages, with images only where they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from rewards.responses import LaterPicture, Picture, conversations, group
from rewards.reward_server import serving
from rewards.user_functions import totals, user_rewarder

from vlmrl.config.reward import Reward
from vlmrl.config.serve import Serve
from vlmrl.rewards.messages import to_plain, with_images
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.rewards.server import FunctionScorer, make_app
from vlmrl.types import ChatMessage, Group, Pixels

FUNCTIONS = """
PROMPT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how many?"}]
TWO = [
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "no: again"},
    {"role": "assistant", "content": "7"},
]
ONE = [{"role": "assistant", "content": "eight"}]


def texts(messages):
    if messages == [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "8"}]:
        return 0.5
    return {"total": [PROMPT + TWO, PROMPT + ONE].index(messages), "roles": len(messages)}


def responses(messages, response):
    assert messages[-1] == {"role": "assistant", "content": response}
    return sum(message["role"] == "assistant" for message in messages)


def pictures(messages, images):
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    sizes = [part["image"].size for part in parts if part["type"] == "image"]
    assert [image.size for image in images] == [(5, 4)], "images are those of the prompt"
    assert messages[1]["content"][1] == {"type": "text", "text": "how many?"}
    if len(messages) == 5:
        assert [part["type"] for part in messages[3]["content"]] == ["text", "image", "text"]
        picture = messages[3]["content"][1]["image"]
        assert picture.getpixel((1, 2)) == (7, 7, 7)
        picture.putpixel((1, 2), (0, 0, 0))
    return sizes.index((2, 3)) if (2, 3) in sizes else -len(sizes)


def first(response, images): return images[0].size[0]


def trl(prompts, completions, family, **kwargs):
    assert prompts == [PROMPT, PROMPT] and completions == [TWO, ONE] and family == ["x", "x"]
    return [len(completion) for completion in completions]


def trl_pictures(completions, images):
    assert [[image.size for image in row] for row in images] == [[(5, 4)], [(5, 4)]]
    assert completions[0][1]["content"][1]["image"].size == (2, 3)
    return [1.0, 2.0]


def openrlhf(queries, prompts, labels):
    tails = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)]
    assert tails == ["6<end><user>no: <pic>again<bot>7", "eight"], tails
    return [1.0, 2.0]
"""

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leftover_processes")]


class UnreadPicture(Picture):
    def fetch(self) -> Pixels:
        raise AssertionError("nobody reads this image")


class UnreadLaterPicture(LaterPicture):
    def fetch(self) -> Pixels:
        raise AssertionError("nobody reads this image")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "talk.py"
    path.write_text(FUNCTIONS)
    return path


def test_content_is_text_unless_images_are_read() -> None:
    first = Picture()
    messages = (ChatMessage("user", (first, "a", "b")), ChatMessage("assistant", ("c",)))
    assert to_plain(messages) == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    user, assistant = with_images(to_plain(messages, lambda media: media.hash), lambda name: name.upper())
    image, *texts = user["content"]
    assert image == {"type": "image", "image": "C0FFEE"}
    assert [part["text"] for part in texts] == ["a", "b"]
    assert assistant == {"role": "assistant", "content": "c"}


@pytest.mark.parametrize(
    ("function", "one", "expected"),
    [
        ("texts", conversations(UnreadPicture(), UnreadLaterPicture()), [0.0, 1.0]),
        ("responses", conversations(UnreadPicture(), UnreadLaterPicture()), [2.0, 1.0]),
        ("first", conversations(Picture(), UnreadLaterPicture()), [5.0, 5.0]),
        ("pictures", conversations(), [1.0, -1.0]),
        ("trl", conversations(UnreadPicture(), UnreadLaterPicture()), [3.0, 1.0]),
        ("trl_pictures", conversations(), [1.0, 2.0]),
        ("openrlhf", conversations(UnreadPicture(), UnreadLaterPicture()), [1.0, 2.0]),
    ],
)
async def test_a_function_reads_the_whole_conversation(
    file: Path, function: str, one: Group, expected: list[float]
) -> None:
    assert await totals(user_rewarder(file, function), [one, one]) == [expected, expected]


async def test_the_same_function_reads_a_single_response(file: Path) -> None:
    assert await totals(user_rewarder(file, "texts"), [group("8")]) == [[0.5]]
    assert await totals(user_rewarder(file, "responses"), [group("8", "9")]) == [[1.0, 1.0]]


async def test_built_in_functions_read_the_last_response() -> None:
    # The label is 7; the first conversation said 6 before.
    assert await totals(Rewarder(Reward(functions={"exact": 1.0})), [conversations()]) == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("function", "images", "expected"),
    [
        ("texts", "none", [0.0, 1.0]),
        ("texts", "data", [0.0, 1.0]),
        ("responses", "hash", [2.0, 1.0]),
        ("pictures", "data", [1.0, -1.0]),
        ("trl", "none", [3.0, 1.0]),
        ("trl_pictures", "data", [1.0, 2.0]),
        ("openrlhf", "none", [1.0, 2.0]),
    ],
)
async def test_a_served_function_reads_the_whole_conversation(
    file: Path, function: str, images: str, expected: list[float]
) -> None:
    one = conversations() if images == "data" else conversations(UnreadPicture(), UnreadLaterPicture())
    async with (
        FunctionScorer({}, f"{file}:{function}", num_workers=1, time_limit_s=5.0) as scorer,
        serving(make_app(scorer, Serve(), token=None)) as url,
    ):
        reward = Reward.model_validate({"remote_url": url, "remote_images": images})
        assert await totals(Rewarder(reward, token=""), [one]) == [expected]


async def test_a_served_function_reads_single_responses_as_texts(file: Path) -> None:
    async with (
        FunctionScorer({}, f"{file}:texts", num_workers=1, time_limit_s=5.0) as scorer,
        serving(make_app(scorer, Serve(), token=None)) as url,
    ):
        assert await totals(Rewarder(Reward(remote_url=url), token=""), [group("8")]) == [[0.5]]
