"""Text that leaves the machine has file names without their folders."""

import pytest

from vlmrl.rewards.paths import without_paths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("No such file: '/home/ann/models/x.json'", "No such file: '.../x.json'"),
        ("ValueError: no idea (rewards/my.py:12)", "ValueError: no idea (.../my.py:12)"),
        ("x (../../srv/ann/my.py:3)", "x (.../my.py:3)"),
        ("~/a/b.py, ~/x and ./y.txt", ".../b.py, .../x and .../y.txt"),
        ("file:///home/ann/x.png", ".../x.png"),
        ("(my.py:3)", "(my.py:3)"),
    ],
)
def test_paths_are_reduced_to_their_last_part(text: str, message: str) -> None:
    assert without_paths(text) == message


@pytest.mark.parametrize(
    "text", ["3/4 of \\frac{1}{2} and/or 1 / 2", "answer 1/2/3, 5 km/h, TCP/IP", "http://10.0.0.1:5000/get_reward"]
)
def test_other_text_is_unchanged(text: str) -> None:
    assert without_paths(text) == text
