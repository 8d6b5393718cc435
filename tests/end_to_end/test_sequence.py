"""Real DeepSpeed on CPU: ranks that share the tokens of their passes take the steps of one rank."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from learning_rank import PACKED, PADDED, SHARED
from ranks import Ranks, python
from recipes import read_metrics, recipe

from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig

FROZEN = {"freeze_visual_encoder": True, "freeze_projector": True}
STEPS = {
    # Two ranks with one attention head each, which share one key head.
    "vl_2": ("vl", {"cut": SHARED, "stage": 2}),
    "deep_3": ("deep", {"cut": SHARED, "stage": 3, "look": True, "gradient_checkpointing_enable": True}),
}
MORE = {
    "text_3": ("text", {"cut": PACKED, "stage": 3}),
    "vl_0": ("vl", {"cut": SHARED}),
    "vl_3": ("vl", {"cut": PACKED, "stage": 3}),
    "vl_padded": ("vl", {"cut": PADDED, "stage": 2}),
    "deep_2": ("deep", {"cut": PACKED, "stage": 2}),
    "text_many": ("text", {"cut": SHARED | {"max_tokens": 60}, "stage": 2}),
    "vl_reentrant": (
        "vl",
        {
            "cut": SHARED,
            "stage": 2,
            "gradient_checkpointing_enable": True,
            "gradient_checkpointing_reentrant": True,
        },
    ),
}
"""Of `make prove`."""
IN_PAIRS = STEPS | {"text_3": MORE["text_3"]}


@pytest.fixture(scope="module")
def runs(models: dict[str, str], proves: bool, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of all jobs: one rank, and two ranks that share all tokens; with `prove` two that resume, and four in
    pairs."""
    ranks = Ranks(tmp_path_factory.mktemp("runs"), Path(__file__).with_name("critic_rank.py"))
    given = {name: {"model": models[name], "old": str(ranks.folder / f"{name}.npz")} for name in models}
    for name in models if proves else ("vl", "deep"):
        ranks.add(name, "score", model=models[name])
        ranks.add(f"{name}_alone", "update", **given[name], cut=PADDED)
    ranks.add("gspo_alone", "update", **given["vl"], cut=PADDED, loss=GSPO)
    ranks.add("lora_alone", "adapt", **given["deep"], cut=PADDED, lora={})
    ranks.add("value_alone", "value", **given["vl"], cut="padded_many")
    if proves:
        ranks.add("frozen_alone", "update", **given["deep"], cut=PADDED, cache_gib=0.0, **FROZEN)
    ranks.run(1)

    for name, (model, options) in (STEPS | (MORE if proves else {})).items():
        ranks.add(name, "update", **given[model], **options, sequence=2)
    ranks.add("gspo", "update", **given["vl"], cut=PACKED, loss=GSPO, stage=2, sequence=2)
    ranks.add("lora", "adapt", **given["deep"], cut=SHARED, lora={}, stage=3, sequence=2)
    ranks.add("value", "value", **given["vl"], cut="shared_one", stage=2, sequence=2)
    checkpoint = str(ranks.folder / "checkpoint")
    if proves:
        ranks.add("frozen", "update", **given["deep"], cut=SHARED, stage=2, sequence=2, **FROZEN)
        ranks.add("unbroken", "unbroken", **given["vl"], folder=checkpoint, lora=DROPOUT, stage=2, sequence=2)
    ranks.run(2)
    if proves:
        ranks.add("continued", "continued", **given["vl"], folder=checkpoint, lora=DROPOUT, stage=2, sequence=2)
        ranks.run(2)
        for name, (model, options) in IN_PAIRS.items():
            ranks.add(f"{name}_in_pairs", "update", **given[model], **options, sequence=2)
        ranks.add("few_heads", "fails", task="update", **given["text"], cut=SHARED, sequence=4)
        ranks.add("value_in_pairs", "value", **given["vl"], cut="packed_many", stage=3, sequence=2)
        ranks.run(4)
    return ranks


DROPOUT = {"dropout": 0.3}
"""Each rank draws masks of its own."""
GSPO = {"kind": "gspo", "aggregation": "sequence", "clip_low": 0.03, "clip_high": 0.04}
"""The loss of a token depends on all of its response, which several ranks hold."""


@pytest.mark.parametrize(
    "name",
    [
        *STEPS,
        *(pytest.param(name, marks=pytest.mark.prove) for name in (*MORE, *(f"{name}_in_pairs" for name in IN_PAIRS))),
    ],
)
def test_a_step_is_that_of_one_rank(runs: Ranks, name: str) -> None:
    alone = f"{name.split('_')[0]}_alone"
    runs.assert_close(name, alone)
    for mine, other in zip(runs.json(name)["steps"], runs.json(alone)["steps"], strict=True):
        for metric in ("loss", "entropy", "clip_fraction", "kl_old", "ratio_max", "grad_norm"):
            assert mine[f"policy/{metric}"] == pytest.approx(other[f"policy/{metric}"], rel=1e-3, abs=1e-6), metric


def test_losses_of_whole_responses_adapters_and_critics_too(runs: Ranks) -> None:
    runs.assert_close("gspo", "gspo_alone")
    runs.assert_close("lora.adapter", "lora_alone.adapter")
    runs.assert_close("lora.logprobs", "lora_alone.logprobs", 2e-6)
    runs.assert_close("value", "value_alone")
    runs.assert_close("value.values", "value_alone.values", 2e-6)


@pytest.mark.prove
def test_frozen_towers_and_critics_in_pairs_too(runs: Ranks) -> None:
    runs.assert_close("frozen", "frozen_alone")
    runs.assert_close("value_in_pairs", "value_alone")


def test_counts_are_those_of_one_rank(runs: Ranks) -> None:
    mine = runs.json("vl_2")["steps"][0]
    # Groups of one, two and one image: each image counts once, though both ranks encode it.
    assert mine["vision/tower_calls"] == 4
    assert mine["pack/tokens"] < runs.json("vl_alone")["steps"][0]["pack/tokens"]


@pytest.mark.prove
def test_a_continued_run_equals_an_unbroken_one_bit_for_bit(runs: Ranks) -> None:
    for rank in (0, 1):
        unbroken, continued = runs.json(f"unbroken.{rank}"), runs.json(f"continued.{rank}")
        assert continued.pop("extra") == {"step": 2, "note": "é"}
        unbroken.pop("extra")
        assert continued == unbroken


@pytest.mark.prove
def test_a_group_that_does_not_divide_the_heads_is_refused_by_name(runs: Ranks) -> None:
    kind, line = runs.json("few_heads")
    assert kind == "ConfigError"
    assert "4 does not divide the 2 attention heads of Qwen3ForCausalLM" in line


def bench(model: str, size: int, tokens: int) -> dict[str, Any]:
    """The measurements of a step on one response."""
    words = f"bench step --actor.model_name_or_path {model} --ds.param_dtype fp32 --ds.sequence_parallel_size {size}"
    batch = "--bench.groups 1 --bench.n_samples_per_prompt 1 --bench.prompt_tokens 16 --bench.layouts shared"
    more = f"--bench.response_tokens {tokens - 16} --bench.repeats 1 --train.max_tokens_per_gpu {tokens}"
    done = subprocess.run(
        [python(), "-m", "vlmrl", *words.split(), *batch.split(), *more.split()],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    measured: dict[str, Any] = json.loads(line)
    return measured


@pytest.mark.prove
def test_two_ranks_take_sixty_percent_of_the_memory_of_one_at_most(models: dict[str, str]) -> None:
    alone, shared = (bench(models["text"], size, 2**13) for size in (1, 2))
    assert (alone["ranks"], shared["ranks"]) == (1, 2)
    assert shared["gradient_max"] == pytest.approx(alone["gradient_max"], rel=1e-3)
    assert shared["gflop"] == pytest.approx(alone["gflop"] / 2, rel=0.01)
    assert shared["peak_mib"] <= 0.6 * alone["peak_mib"]


@pytest.mark.usefixtures("ray_session")
def test_a_run_has_the_metrics_of_one_rank(models: dict[str, str], tmp_path: Path) -> None:
    flags = {"train.max_steps": 2, "train.batch_size": 8, "data.prompt_dataset": "visual_math?families=count&pixels=56"}
    steps = {}
    for size in (1, 2):
        out = tmp_path / str(size)
        ranks = {"actor.num_gpus_per_node": size, "ds.sequence_parallel_size": size, "ds.zero_stage": 3}
        train_sft(load(SftConfig, recipe("quickstart_sft.yaml", models["vl"], out, **flags, **ranks)))
        steps[size] = [line for line in read_metrics(out) if "policy/loss" in line]
    assert len(steps[1]) == len(steps[2]) == 2
    for alone, shared in zip(steps[1], steps[2], strict=True):
        for metric in ("policy/loss", "policy/grad_norm", "policy/entropy", "pack/tokens", "vision/tower_calls"):
            assert shared[metric] == pytest.approx(alone[metric], rel=1e-4), metric
