"""The stages of each quickstart fit together: one trains what the other has left in its folder."""

from pathlib import Path

import pytest

from vlmrl.commands.quickstart import _VARIANTS, main
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", _VARIANTS)
def test_the_second_stage_trains_the_model_of_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    variant = _VARIANTS[name]
    folder = f"runs/{variant.folder}"
    warm_up, rl = load(SftConfig, variant.warm_up), load(RlConfig, variant.recipe)
    assert warm_up.actor.model_name_or_path == f"{folder}/start"
    assert warm_up.ckpt.output_dir == f"{folder}/sft"
    assert rl.actor.model_name_or_path == f"{folder}/sft/model"
    assert rl.ckpt.output_dir == f"{folder}/rl"
    assert rl.has_agent == (name == "agent")


def test_another_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora"]) == 2
    assert "quickstart takes no argument or qlora or agent, not lora" in capsys.readouterr().err
