"""Settings of `vlmrl rm`: defaults, and those that one of its kinds does not read."""

from typing import Any

import pytest
from pydantic import ValidationError

from vlmrl.config.stages import RmConfig


def rm(**sections: dict[str, Any]) -> RmConfig:
    needed = {"actor": {"model_name_or_path": "m"}, "data": {"prompt_dataset": "d"}}
    return RmConfig.model_validate(
        {name: needed.get(name, {}) | sections.get(name, {}) for name in {**needed, **sections}}
    )


def test_the_default_rate_is_that_of_reward_models_and_higher_for_adapters() -> None:
    assert rm().actor.adam.lr == 9e-6
    assert rm(ds={"lora": {"rank": 8}}).actor.adam.lr == 1e-5
    assert rm(actor={"adam": {"lr": 1e-4}}, ds={"lora": {"rank": 8}}).actor.adam.lr == 1e-4


@pytest.mark.parametrize(
    ("kind", "section", "values"),
    [
        ("outcome", "data", {"label_key": "x"}),
        ("outcome", "data", {"output_key": "x"}),
        ("outcome", "rm", {"process_separator": ";"}),
        ("process", "data", {"chosen_key": "x"}),
        ("process", "data", {"rejected_key": "x"}),
        ("process", "data", {"margin_key": "x"}),
        ("process", "rm", {"loss_type": "logexp"}),
    ],
)
def test_settings_of_the_other_kind_are_refused(kind: str, section: str, values: dict[str, Any]) -> None:
    sections = {"rm": {"kind": kind}}
    sections[section] = sections.get(section, {}) | values
    with pytest.raises(ValidationError, match=rf"{section}.{next(iter(values))} would not be read: rm.kind {kind}"):
        rm(**sections)


def test_settings_of_rl_are_no_settings_of_rm() -> None:
    assert not {name for name in RmConfig.settings() if name.startswith(("rollout.", "reward.", "vllm.", "algo."))}
    assert {"eval.early_stop_patience", "data.margin_key", "rm.kind", "train.layout"} <= RmConfig.settings().keys()
