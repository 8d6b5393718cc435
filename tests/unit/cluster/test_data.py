"""The settings of a run's source of prompts."""

import json
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.agents.settings import EnvironmentSettings
from vlmrl.cluster.data import SourceSettings
from vlmrl.config.agent import Agent
from vlmrl.config.data import Data
from vlmrl.errors import ConfigError
from vlmrl.models import tiny

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


def test_prompts_show_the_tools_of_an_environment_and_fit_into_its_conversations(tmp_path: Path) -> None:
    (tmp_path / "quiz.py").write_text(ENVIRONMENT)
    Image.new("RGB", (56, 56)).save(tmp_path / "one.png")
    rows = [{"input": "two pictures", "images": ["one.png", "one.png"]}, {"input": "none", "images": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(prompt_dataset=str(tmp_path / "rows.jsonl"), max_dropped_fraction=0.5)
    spec = f"{tmp_path / 'quiz.py'}:make"
    source = SourceSettings(
        model=str(tiny.build("qwen2_5_vl", tmp_path / "micro", size="micro")),
        trust_remote_code=False,
        data=data,
        evaluation=None,
        seed=1,
        environments=EnvironmentSettings(spec=spec, agent=Agent(max_images=1), columns=data, log=None),
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
