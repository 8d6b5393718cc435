import json
from pathlib import Path

import pytest

from vlmrl.errors import ConfigError
from vlmrl.models.kind import check_generates, is_classifier


def model(folder: Path, architecture: str) -> str:
    config = {"model_type": "qwen3", "architectures": [architecture], "hidden_size": 8, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_reward_model_does_not_generate(tmp_path: Path) -> None:
    path = model(tmp_path, "Qwen3ForSequenceClassification")
    assert is_classifier(path)
    with pytest.raises(ConfigError, match=r"^sft\.teacher_model_name_or_path: .* as a reward model has"):
        check_generates(path, flag="sft.teacher_model_name_or_path")


def test_a_language_model_generates(tmp_path: Path) -> None:
    check_generates(model(tmp_path, "Qwen3ForCausalLM"))
