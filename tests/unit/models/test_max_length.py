import json
from pathlib import Path

import pytest

from vlmrl.errors import ConfigError
from vlmrl.models.max_length import check_length, max_positions


def model(folder: Path, **more: object) -> str:
    config = {"model_type": "qwen3", "max_position_embeddings": 128, "hidden_size": 8, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config | more))
    return str(folder)


@pytest.mark.parametrize(
    ("rope", "known"),
    [
        (None, 128),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, 512),
        # Their max_position_embeddings include the factor.
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_positions_equal_those_of_vllm(rope: dict[str, object] | None, known: int, tmp_path: Path) -> None:
    path = model(tmp_path, **({"rope_parameters": rope} if rope else {}))
    assert max_positions(path) == known


def test_sequences_that_an_engine_would_refuse_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path)
    check_length(path, 128, settings="a and b")
    with pytest.raises(ConfigError, match=r"^a and b are 129 tokens, and .* has 128 positions: lower one of them$"):
        check_length(path, 129, settings="a and b")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_length(path, 129, settings="a and b")
