"""What an environment returned is text and pixels, or unusable."""

import io
from typing import Any

import numpy as np
import pytest
from agents.user_environments import LIMITS
from PIL import Image

from vlmrl.agents import Reply
from vlmrl.agents.messages import Picture
from vlmrl.agents.observations import UnusableError, of_reset, of_step, of_tool

RED = Image.new("RGB", (2, 1), (255, 0, 0))
PICTURE = Picture(2, 1, b"\xff\0\0" * 2)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("x", ["x"]),
        ("", [""]),
        (RED, [PICTURE]),
        ([RED, "x", np.asarray(RED)], [PICTURE, "x", PICTURE]),
        (("x",), ["x"]),
        (Image.new("RGBA", (1, 1), (0, 0, 0, 0)), [Picture(1, 1, b"\xff" * 3)]),
        (np.zeros((1, 2), np.uint8), [Picture(2, 1, bytes(6))]),
        ("\ud800 half", ["? half"]),
    ],
)
def test_texts_and_images_in_order(content: Any, parts: list[Any]) -> None:
    assert of_reset(1, content, LIMITS).parts == parts
    assert of_step(1, Reply(content), LIMITS).parts == parts
    assert of_tool(1, "zoom", content, LIMITS).parts == parts


def test_an_image_of_a_file_is_decoded_upright() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    RED.save(file, "PNG", exif=exif)
    (part,) = of_reset(1, Image.open(file), LIMITS).parts
    assert part == Picture(1, 2, PICTURE.rgb)


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1), np.array(1)])
def test_rewards_are_numbers_of_any_type(reward: Any) -> None:
    assert of_step(1, Reply("x", reward=reward), LIMITS).reward == 1.0


def test_content_is_optional_at_the_end_and_at_the_start() -> None:
    answer = of_step(3, Reply(done=np.bool_(True), reward=0.5), LIMITS)
    assert (answer.number, answer.parts, answer.reward, answer.done) == (3, [], 0.5, True)
    assert of_reset(1, None, LIMITS).parts == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (None, "null"), ([1, "x"], '[1, "x"]'), ({"ü": True}, '{"ü": true}'), ([], "[]"), (np.int64(3), "3")],
)
def test_a_tool_may_return_any_json_value(value: Any, text: str) -> None:
    assert of_tool(1, "facts", value, LIMITS).parts == [text]


def test_a_tool_may_end_the_episode() -> None:
    answer = of_tool(1, "submit", Reply("bye", reward=2, done=True), LIMITS)
    assert (answer.parts, answer.reward, answer.done) == (["bye"], 2.0, True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (Reply("x", reward=float("nan")), "step returned the reward nan, which is not a finite number"),
        (Reply("x", reward=10**400), "step returned the reward inf"),
        (Reply("x", reward=-1e300), "step returned the reward -1e\\+300, and a reward is at most 1,000,000,000"),
        (Reply("x", reward="1"), "step returned a str as reward where a number is expected"),  # type: ignore[arg-type]
        (Reply("x", done=1), "step returned an int as done where True or False is expected"),  # type: ignore[arg-type]
        (None, "step returned None where a Reply is expected"),
        ("x", "step returned a str where a Reply is expected"),
        (("x", 1.0, True), "step returned a tuple where a Reply is expected"),
        (Reply(), "step returned None where text or an image is expected"),
        (Reply(3), "step returned an int where text or an image is expected"),
        (Reply([b"x"]), "step returned a bytes where text or an image is expected"),
        (Reply(np.zeros((0, 4, 3), np.uint8)), r"array of uint8 \[0, 4, 3\]"),
        (Reply(np.zeros((4, 4, 3))), r"array of float64 \[4, 4, 3\]; an image is \[height, width, 3\] of uint8"),
        (Reply(Image.new("L", (400, 300))), r"\(400x300\) has more than 100000 pixels"),
        (Reply(Image.new("RGB", (3000, 1))), "too elongated"),
        (Reply([Image.new("RGB", (300, 300))] * 2), "images of more than 150000 pixels in total"),
        (Reply(["x"] * 1000), "1000 texts and images"),
        (Reply("x" * 2_000_000), "more than 1000000 characters"),
    ],
)
def test_anything_else_is_unusable(returned: Any, message: str) -> None:
    with pytest.raises(UnusableError, match=message):
        of_step(1, returned, LIMITS)


def test_a_damaged_image_and_an_object_of_a_tool_are_unusable() -> None:
    file = io.BytesIO()
    Image.effect_noise((200, 200), 50).save(file, "PNG")
    with pytest.raises(UnusableError, match="damaged or truncated"):
        of_reset(1, Image.open(io.BytesIO(file.getvalue()[:5000])), LIMITS)
    with pytest.raises(UnusableError, match="zoom returned an object where text, images or JSON are expected"):
        of_tool(1, "zoom", object(), LIMITS)


def test_an_array_is_measured_before_its_pixels_are_copied() -> None:
    million_by_million = np.broadcast_to(np.uint8(0), (10**6, 10**6, 3))
    with pytest.raises(UnusableError, match=r"an image that step returned \(1000000x1000000\) has more than"):
        of_step(1, Reply(million_by_million), LIMITS)
