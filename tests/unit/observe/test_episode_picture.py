import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl.errors import DataError
from vlmrl.observe.episode_picture import draw_episode, longest_episode


def response(score: float, *turns: tuple[str, float]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for text, reward in turns:
        messages.append({"role": "user", "text": "<image>Which way?", "images": ["b"], "reward": 0.0})
        messages.append({"role": "assistant", "text": text, "images": [], "reward": reward})
    return {"text": turns[-1][0], "score": score, "messages": messages[1:]}


def test_the_longest_rewarded_episode_is_drawn(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{name}.png")
    lost = response(0.0, *[("up", 0.0)] * 9)
    short = response(1.0, ("left", 1.0))
    won = response(1.0, *[("down $x^{ \a \u4e0b \ud800", 0.0)] * 7, ("right", 1.0))
    transcript = tmp_path / "step.jsonl"
    transcript.write_text(
        "".join(json.dumps({"images": ["a"], "responses": group}) + "\n" for group in ([short, lost], [lost, won]))
    )
    record, number = longest_episode(transcript)
    assert record["responses"][number] == won
    draw_episode(record, number, media=tmp_path, out=tmp_path / "episode.png")
    picture = Image.open(tmp_path / "episode.png").convert("RGB")
    counts = {colour: count for count, colour in picture.getcolors(10**6) or []}
    red, blue = (counts.get(colour, 0) for colour in ((255, 0, 0), (0, 0, 255)))
    assert blue == pytest.approx(7 * red, rel=0.1)


def test_a_transcript_without_episodes_is_an_error(tmp_path: Path) -> None:
    transcript = tmp_path / "step.jsonl"
    transcript.write_text(json.dumps({"images": [], "responses": [{"text": "5", "score": 1.0}]}) + "\n")
    with pytest.raises(DataError, match="no episode"):
        longest_episode(transcript)
