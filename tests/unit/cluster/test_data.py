"""The settings of a run's source of prompts."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scripted_episodes import make_episode_rollout, make_segment

from vlmrl.agents.settings import EnvironmentSettings
from vlmrl.cluster import data
from vlmrl.cluster.data import SourceSettings, StoredMedia
from vlmrl.config.agent import Agent
from vlmrl.config.data import Data
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.types import ChatMessage, Group, Pixels, Prompt

ENVIRONMENT = '''
from vlmrl.agents import Reply, tool


class Quiz:
    def step(self, response):
        return Reply(done=True)

    @tool
    def hint(self) -> str:
        """Give a hint."""
        return "no"


def make():
    return Quiz()
'''


def test_images_of_an_environment_are_kept_when_the_engine_that_made_them_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, Pixels] = {}

    def put(pixels: Pixels) -> str:
        store[f"driver {len(store)}"] = pixels
        return f"driver {len(store) - 1}"

    monkeypatch.setattr(data, "ray", SimpleNamespace(put=put, get=lambda ref, timeout: store[ref]))

    def stored(name: str, owner: str) -> StoredMedia:
        store[f"{owner} {name}"] = np.full((2, 2, 3), len(name), np.uint8)
        return StoredMedia(name, (2, 2), f"{owner} {name}")  # type: ignore[arg-type]

    row, start, frame = stored("row", "data"), stored("start", "engine"), stored("frame", "engine")
    prompt = Prompt(3, "toy:3", "?", tokens=np.arange(2), request=np.arange(2), label=None, media=(row,))
    # The agent's own copy of the row's image comes with the engine's handle.
    first = replace(prompt, media=(stored("row", "engine"), start), messages=(ChatMessage("user", ("look", start)),))
    segment = make_segment([[0, 1], [2], [3], [4]], media=(row, start, frame))
    rollout = make_episode_rollout(segment)
    assert rollout.episode is not None
    said = (*rollout.episode.messages, ChatMessage("user", (frame, "next")))
    rollout = replace(rollout, episode=replace(rollout.episode, messages=said))
    kept = data.keep_media(Group(first, (rollout,)), prompt)
    for name in [name for name in store if name.startswith("engine")]:
        del store[name]
    assert kept.rollouts[0].episode is not None
    held = [*kept.prompt.media, *kept.segments[0].media]
    held += [item for message in (*kept.prompt.messages, *kept.rollouts[0].episode.messages) for item in message.media]
    assert [item.hash for item in held] == ["row", "start", "row", "start", "frame", "start", "frame"]
    assert [int(item.fetch().mean()) for item in held] == [len(item.hash) for item in held]
    assert len(store) == 3, "each is copied once, and the row's is not"


def test_prompts_show_the_tools_of_an_environment_and_fit_into_its_conversations(tmp_path: Path) -> None:
    (tmp_path / "quiz.py").write_text(ENVIRONMENT)
    Image.new("RGB", (56, 56)).save(tmp_path / "one.png")
    rows = [{"input": "two pictures", "images": ["one.png", "one.png"]}, {"input": "none", "images": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Data(prompt_dataset=str(tmp_path / "rows.jsonl"), max_dropped_fraction=0.5)
    spec = f"{tmp_path / 'quiz.py'}:make"
    source = SourceSettings(
        model=str(tiny.build("qwen2_5_vl", tmp_path / "micro", size="micro")),
        trust_remote_code=False,
        data=columns,
        evaluation=None,
        seed=1,
        environments=EnvironmentSettings(spec=spec, agent=Agent(max_images=1), columns=columns, log=None),
    ).build()
    prompts, _ = source.draw(2)
    assert [prompt.source for prompt in prompts] == ["rows:1"] * 2
    assert "Give a hint." in prompts[0].text
    assert source.take_warnings() == ["row rows:0 dropped, too many images: 2 images, agent.max_images is 1"]


def test_tools_without_a_turn_for_their_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "quiz.py").write_text(ENVIRONMENT)
    spec = f"{tmp_path / 'quiz.py'}:make"
    settings = EnvironmentSettings(spec=spec, agent=Agent(max_turns=1), columns=Data(prompt_dataset="x"), log=None)
    with pytest.raises(ConfigError, match=r"agent\.max_turns 1 leaves no turn for the results of tools \(\w+\)"):
        settings.list_tools()
