from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.commands.bench.dpo import step
from vlmrl.config.bench_verbs import DpoBench
from vlmrl.models import tiny


def test_shared_prompts_compute_fewer_tokens_with_equal_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.build("qwen3", tmp_path / "model", size="micro")
    config = DpoBench.model_validate(
        {
            "actor": {"model_name_or_path": str(model)},
            "ds": {"param_dtype": "fp32"},
            "bench": {"groups": 2, "prompt_tokens": 16, "response_tokens": (4, 6), "repeats": 1},
        }
    )
    step(config)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["layout"] for line in lines] == ["padded", "packed", "shared"]
    # Two pairs of responses of 4 and 6 tokens to prompts of 16: padded to 22 each, side by side, and with prompts once.
    assert [line["tokens_computed"] for line in lines] == [88, 84, 52]
    for line in lines:
        assert line["bench"] == "dpo"
        assert line["samples"] == 4
        assert line["gradient_diff_max"] < 1e-4
        assert line["logprob_diff_max"] < 1e-4
