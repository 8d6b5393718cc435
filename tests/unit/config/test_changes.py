"""Changed settings of a resumed run."""

from __future__ import annotations

import json

from vlmrl.config.changes import changed_settings, format_changes, plain_settings
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig

WORDS = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]


def run(*words: str) -> RlConfig:
    return load(RlConfig, [*WORDS, *words])


def test_settings_are_plain_json_and_only_those_that_are_read() -> None:
    result = plain_settings(run("--actor.adam.betas", "0.9", "0.99"))
    assert json.loads(json.dumps(result)) == result
    assert result["actor.adam.betas"] == [0.9, 0.99]
    assert result["rollout.n_samples_per_prompt"] == 8
    assert "critic.adam.lr" not in result, "there is no critic"
    assert not {"ckpt.load_enable", "ckpt.output_dir"} & result.keys()


def test_changed_settings_have_old_and_new_values() -> None:
    before = plain_settings(run())
    assert changed_settings(before, run("--ckpt.load_enable", "--ckpt.output_dir", "x")) == {}
    result = changed_settings(before, run("--rollout.batch_size", "64", "--train.max_steps", "9"))
    assert result == {"rollout.batch_size": (128, 64), "train.max_steps": (None, 9)}
    assert format_changes(result) == "train.max_steps null -> 9, rollout.batch_size 128 -> 64"


def test_settings_unknown_to_one_run_are_no_change() -> None:
    before = plain_settings(run())
    del before["rollout.temperature"]
    assert changed_settings(before | {"rollout.gone": 1}, run("--rollout.temperature", "0.5")) == {}
    assert changed_settings({}, run()) == {}


def test_a_long_value_is_truncated_to_one_line() -> None:
    line = format_changes({"data.input_template": ("a\nb", "x" * 100)})
    assert line == f"data.input_template a b -> {'x' * 60}..."
