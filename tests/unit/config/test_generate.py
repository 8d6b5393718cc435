"""The settings of `vlmrl generate`: what they refuse, and what follows from what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmrl.config.dump import dump_yaml
from vlmrl.config.load import load
from vlmrl.config.verbs import GenerateConfig
from vlmrl.errors import ConfigError


def generate(**flags: Any) -> GenerateConfig:
    needed = {"actor.model_name_or_path": "m", "data.prompt_dataset": "d"}
    words = [word for name, value in (needed | flags).items() for word in (f"--{name}", str(value))]
    return load(GenerateConfig, words)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"generate.output": "a.txt"}, r"generate\.output a\.txt: its name must end in \.jsonl or \.parquet"),
        (
            {"rollout.best_of": 4, "generate.keep": "all"},
            r"rollout\.best_of keeps the best response and generate\.keep",
        ),
        (
            {"rollout.best_of": 4, "rollout.n_samples_per_prompt": 4},
            r"rollout\.n_samples_per_prompt would not be read: rollout\.best_of is the number",
        ),
        ({"rollout.best_of": 1}, r"--rollout\.best_of 1"),
        ({"generate.keep": "pairs"}, r"generate\.keep pairs needs two responses per prompt: raise rollout\.n_samples"),
        ({"rollout.best_of": 2, "rollout.temperature": 0}, r"rollout\.temperature 0 gives the same response 2 times"),
        (
            {"generate.keep": "best", "reward.functions": "{}"},
            r"generate\.keep best needs scores: set reward\.functions",
        ),
        (
            {"generate.keep": "pairs", "rollout.n_samples_per_prompt": 2, "reward.functions": "{math: 0}"},
            r"generate\.keep pairs needs scores that differ, and every reward has weight 0",
        ),
        (
            {"rollout.best_of": 2, "reward.model_name_or_path": "scorer", "reward.model_weight": 0},
            r"generate\.keep best needs scores that differ, and every reward has weight 0",
        ),
        (
            {"generate.keep": "labels", "reward.model_name_or_path": "scorer"},
            r"generate\.keep labels: the scores of reward\.model_name_or_path do not say .* set generate\.label_thr",
        ),
        ({"reward.model_weight": 2}, r"reward\.model_weight would not be read: there is no reward\.model_name_or_path"),
        ({"train.colocate_all": "true"}, r"train\.colocate_all would not be read: there is no reward model"),
        ({"ds.zero_stage": 3}, r"ds\.zero_stage would not be read: there is no reward model"),
        (
            {"reward.model_name_or_path": "scorer", "vllm.enable_sleep": "true"},
            r"vllm\.enable_sleep frees memory for models on the same GPUs: it needs train\.colocate_all",
        ),
        (
            {"reward.model_name_or_path": "scorer", "reward.remote_url": "f.py:model"},
            r"your function is called model, like the metric of the reward model",
        ),
        ({"reward.clip_range": "[-1, 1]"}, r"reward\.clip_range: vlmrl generate does not have it"),
        ({"generate.label_threshold": 0.2}, r"generate\.label_threshold would not be read: generate\.keep is all"),
        (
            {"generate.keep": "labels", "generate.min_score": 1},
            r"generate\.min_score would not be read: generate\.keep",
        ),
        ({"train.agent_func_path": "a.py:f"}, r"train\.agent_func_path: vlmrl generate does not have it"),
        ({"eval.dataset": "d"}, r"eval\.dataset: vlmrl generate does not have it"),
    ],
)
def test_mistakes(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(**flags)


def test_best_of_is_the_number_of_responses_of_which_the_best_is_kept() -> None:
    config = generate(**{"rollout.best_of": 4})
    assert (config.keep, config.eval.n_samples_per_prompt) == ("best", 4)
    assert generate(**{"rollout.n_samples_per_prompt": 3}).eval.n_samples_per_prompt == 3


def test_rewards_are_the_default_only_where_rows_need_scores() -> None:
    assert not generate().has_scores
    assert generate(**{"rollout.best_of": 4}).reward.functions == {"math": 1.0}
    assert generate(**{"reward.functions": "exact"}).reward.functions == {"exact": 1.0}
    assert generate(**{"reward.remote_url": "f.py"}).has_scores
    by_model = generate(**{"rollout.best_of": 4, "reward.model_name_or_path": "scorer"})
    assert by_model.has_scores
    assert by_model.reward.functions == {}


def test_labels_by_a_reward_model_need_a_threshold_unless_a_reward_checks_responses() -> None:
    flags = {"generate.keep": "labels", "reward.model_name_or_path": "scorer"}
    assert generate(**flags, **{"generate.label_threshold": 0.3}).keep == "labels"
    assert generate(**flags, **{"reward.functions": "math"}).keep == "labels"
    assert generate(**{"generate.keep": "labels", "reward.process_model_name_or_path": "scorer"}).keep == "labels"


def test_greedy_responses_are_allowed() -> None:
    assert generate(**{"rollout.temperature": 0}).eval.temperature == 0


@pytest.mark.parametrize(
    "flags", [{}, {"rollout.best_of": 4, "generate.min_score": 1}, {"generate.keep": "labels", "rollout.top_p": 0.9}]
)
def test_the_saved_settings_repeat_the_run(flags: dict[str, Any], tmp_path: Path) -> None:
    config = generate(**flags)
    dump_yaml(config, tmp_path / "config.yaml")
    assert load(GenerateConfig, ["--config", str(tmp_path / "config.yaml")]).model_dump() == config.model_dump()
