import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from vlmrl.commands.bench import step as module
from vlmrl.commands.bench.step import Measurement, attended_pairs, attention_flops, compare_layouts, step
from vlmrl.config.bench_verbs import StepBench
from vlmrl.data.packing import make_pack
from vlmrl.models import tiny
from vlmrl.types import Layout, Sample


def sample(prompt: int, response: int, group: int) -> Sample:
    return Sample(np.arange(prompt + response), np.arange(prompt + response) >= prompt, group=group)


SAMPLES = [sample(3, 1, 0), sample(3, 2, 0), sample(2, 2, 1)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # Three rows of five tokens, padding included: 3 * (1 + 2 + 3 + 4 + 5).
        ("padded", 45),
        # Lengths 4, 5 and 4.
        ("packed", 10 + 15 + 10),
        # The prompt of three once: 6. Its responses: 1 * 3 + 1 and 2 * 3 + 3. And the single sample of four: 10.
        ("shared", 6 + 4 + 9 + 10),
    ],
)
def test_attended_pairs_follow_the_layout(layout: Layout, expected: int) -> None:
    assert attended_pairs(make_pack(SAMPLES, range(3), layout)) == expected


def test_attention_costs_twelve_per_pair_layer_head_and_channel() -> None:
    text = SimpleNamespace(num_attention_heads=4, head_dim=None, hidden_size=32, num_hidden_layers=3)
    # 12 * (4 heads of 8 channels) * 3 layers * 35 pairs.
    assert attention_flops(make_pack(SAMPLES, range(3), "packed"), text) == 12 * 32 * 3 * 35


def test_a_layout_is_compared_by_its_medians() -> None:
    def measured(passes: list[float], flops: float, logprob: float) -> Measurement:
        seconds = [{"forward": value / 4, "backward": 3 * value / 4, "optimizer": 1.0} for value in passes]
        return Measurement([], flops=flops, logprobs={0: np.array([0.0, logprob], np.float32)}, seconds=seconds)

    comparison = compare_layouts(measured([1.0, 9.0, 1.0], 30.0, -1.5), measured([4.0, 4.0, 40.0], 120.0, -1.0))
    # Passes of 4 s and 1 s; steps of 5 s and 2 s.
    assert comparison == (4.0, 4.0, 2.5, 0.5)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`lines(**settings)`: what the benchmark prints of a micro model, as dictionaries."""
    model = tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("step") / "model", size="micro")

    def run(
        capsys: pytest.CaptureFixture[str], *, train: dict[str, Any] | None = None, **bench: Any
    ) -> list[dict[str, Any]]:
        sizes = {"groups": 2, "n_samples_per_prompt": 2, "prompt_tokens": 30, "response_tokens": [7, 5], "repeats": 1}
        settings = {"actor": {"model_name_or_path": str(model)}, "ds": {"param_dtype": "fp32"}}
        step(StepBench.model_validate(settings | {"bench": sizes | bench, "train": train or {}}))
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_layouts_differ_in_tokens_and_agree_in_results(lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    padded, packed, shared = lines(capsys, image_size=56)
    assert [line["layout"] for line in (padded, packed, shared)] == ["padded", "packed", "shared"]
    # Four samples of 37, 35, 37 and 35 tokens; padded to 37; two prompts of 30 with 12 tokens of responses each.
    assert [line["tokens_computed"] for line in (padded, packed, shared)] == [148, 144, 84]
    assert [line["tokens_useful"] for line in (padded, packed, shared)] == [144] * 3
    assert 1.0 < packed["flop_ratio"] < shared["flop_ratio"] < 148 / 84
    for line in (padded, packed, shared):
        # Two prompts with an image each.
        assert line["tower_calls"] == 2
        assert line["logprob_diff_max"] < 1e-5
        assert line["gradient_diff_max"] < 1e-4 * line["gradient_max"]
        assert line["forward_s"] > 0
        assert len(line["backward_s_each"]) == 1


def test_a_layout_with_different_results_is_detected(
    lines: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.Policy.logprobs

    def off(self: Any, packs: Any, **options: Any) -> Any:
        rows, counts = original(self, packs, **options)
        if len(packs[0].rows) == 1:
            rows = [(i, row + np.float32(0.25)) for i, row in rows]
        return rows, counts

    monkeypatch.setattr(module.Policy, "logprobs", off)
    padded, packed = lines(capsys, layouts=["padded", "packed"])
    assert padded["logprob_diff_max"] == 0.0
    assert packed["logprob_diff_max"] == pytest.approx(0.25, abs=1e-4)


def test_cutting_the_step_into_packs_changes_neither_work_nor_results(
    lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = lines(capsys, layouts=["packed"])
    (halves,) = lines(capsys, layouts=["packed"], train={"micro_batch_size": 2})
    assert (whole["packs"], halves["packs"]) == (1, 2)
    assert halves["tokens_computed"] == whole["tokens_computed"]
    # Each pass runs the tower over a filler, for it trains and the samples are text.
    assert halves["gflop"] == pytest.approx(whole["gflop"], rel=0.1)
    assert halves["gradient_max"] == pytest.approx(whole["gradient_max"], rel=1e-4)


def test_layouts_are_compared_with_the_first_one(lines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    packed, shared = lines(capsys, layouts=["packed", "shared"])
    assert {packed["against"], shared["against"]} == {"packed"}
    assert packed["speedup"] == 1.0
    assert torch.get_num_threads() == shared["threads"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ds": {"zero_stage": 3}}, "ds.zero_stage 3 shards weights over ranks"),
        ({"ds": {"attn_implementation": "sdpa"}}, "leave shared out of bench.layouts"),
        (
            {"ds": {"attn_implementation": "sdpa", "sequence_parallel_size": 2}, "bench": {"layouts": ["packed"]}},
            "sdpa would let the samples of a pack attend to each other",
        ),
        ({"bench": {"layouts": ["padded", "padded"]}}, "bench.layouts padded padded names a layout twice"),
        ({"bench": {"images_per_prompt": 2}}, "bench.images_per_prompt would not be read"),
        ({"bench": {"layouts": []}}, "at least 1"),
        ({"actor": {"model_name_or_path": "m", "num_gpus_per_node": 2}}, "vlmrl bench step does not have it"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        StepBench.model_validate({"actor": {"model_name_or_path": "m"}} | settings)


def test_other_attention_kernels_can_be_measured_without_sharing(tmp_path: Path) -> None:
    settings = {"ds": {"attn_implementation": "sdpa"}, "bench": {"layouts": ["padded", "packed"]}}
    assert StepBench.model_validate({"actor": {"model_name_or_path": "m"}} | settings).bench.repeats == 5
