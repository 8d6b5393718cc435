"""Real DeepSpeed on CPU: the step does not depend on how it is split, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from buffers_task import sharpened
from learning_rank import PACKED, PADDED, SHARED
from ranks import Ranks, python

STAGES = (0, 2, 3)
PROVEN_AT_LENGTH = 1
"""The stage of `make prove` only: it shards less than stage 2 does."""
FROZEN = {"freeze_visual_encoder": True, "freeze_projector": True}


@pytest.fixture(scope="module")
def runs(models: dict[str, str], proves: bool, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of all jobs: one launch with a single rank, one with two ranks, and one that resumes from checkpoints."""
    ranks = Ranks(tmp_path_factory.mktemp("runs"))
    stages = (*STAGES, PROVEN_AT_LENGTH) if proves else STAGES
    vl = {"model": models["vl"], "old": str(ranks.folder / "vl.npz")}
    for name, model in models.items():
        ranks.add(name, "score", model=model)
        arguments = {"model": model, "old": str(ranks.folder / f"{name}.npz")}
        ranks.add(f"{name}_alone", "update", **arguments, cut=PADDED, save=str(ranks.folder / f"{name}_model"))
    for stage in stages:
        ranks.add(f"alone_{stage}", "update", **vl, cut=SHARED, stage=stage)
        ranks.add(f"alone_many_{stage}", "update", **vl, cut=PADDED, stage=stage)
    for aggregation in ("sequence", "constant"):
        loss = {"aggregation": aggregation, "kl_estimator": "k3", "dual_clip": 1.5}
        ranks.add(f"alone_{aggregation}", "update", **vl, cut=PADDED, loss=loss, kl_coef=0.1)
    ranks.add("alone_packed", "update", **vl, cut=PACKED)
    ranks.add("recomputed", "update", **vl, cut=SHARED, stage=2, gradient_checkpointing_enable=True, look=True)
    ranks.add(
        "recomputed_reentrant",
        "update",
        **vl,
        cut=SHARED,
        stage=2,
        gradient_checkpointing_enable=True,
        gradient_checkpointing_reentrant=True,
    )
    ranks.add("offloaded", "update", **vl, cut=PADDED, stage=2, offload=True)
    ranks.add("offloaded_3", "update", **vl, cut=PADDED, stage=3, offload=True)
    ranks.add("frozen", "update", **vl, cut=PADDED, stage=2, cache_gib=0.0, **FROZEN)
    ranks.add("frozen_kept", "update", **vl, cut=SHARED, **FROZEN)
    deep = {"model": models["deep"], "old": str(ranks.folder / "deep.npz")}
    ranks.add("frozen_deep", "update", **deep, cut=PADDED, cache_gib=0.0, **FROZEN)
    ranks.add("taught", "supervise", model=models["vl"], cut=PADDED)
    for where in ("loss", "gradient"):
        for stage in (0, 2, 3):
            ranks.add(
                f"poisoned_{where}_{stage}", "fails", task="poisoned", model=models["vl"], where=where, stage=stage
            )
    _add_buffers(ranks, models, stages)
    ranks.run(1)

    for stage in stages:
        cut = PACKED if stage in (0, 3) else SHARED
        ranks.add(f"pair_{stage}", "update", **vl, cut=cut, stage=stage, save=str(ranks.folder / f"model_{stage}"))
        ranks.add(f"pair_bf16_{stage}", "update", **vl, cut=PADDED, stage=stage, dtype="bf16", prove=True)
    ranks.add("pair_many_2", "update", **vl, cut=PADDED, stage=2)
    ranks.add("pair_many_3", "update", **vl, cut=PADDED, stage=3)
    recompute = {"gradient_checkpointing_enable": True}
    away = {"stage": 3, "place": "cpu"}
    ranks.add("away_pair", "update", **vl, cut=SHARED, look=True, **away, **recompute)
    ranks.add("away_bf16", "update", **vl, cut=PADDED, dtype="bf16", prove=True, **away)
    ranks.add("away_frozen", "update", **vl, cut=SHARED, warm=True, **away, **FROZEN)
    ranks.add("unbroken_away", "unbroken", **vl, folder=str(ranks.folder / "checkpoint_away"), **away)
    ranks.add("pair_shared_3", "update", **vl, cut=SHARED, stage=3, look=True, **recompute)
    ranks.add("pair_shared_many_3", "update", **vl, cut=SHARED | {"max_tokens": 120}, stage=3)
    for stage in (2, 3):
        ranks.add(f"frozen_pair_{stage}", "update", **vl, cut=SHARED, stage=stage, warm=True, **FROZEN)
    ranks.add("frozen_pair_deep", "update", **deep, cut=SHARED, stage=3, warm=True, **recompute, **FROZEN)
    for aggregation in ("sequence", "constant"):
        loss = {"aggregation": aggregation, "kl_estimator": "k3", "dual_clip": 1.5}
        ranks.add(f"pair_{aggregation}", "update", **vl, cut=SHARED, loss=loss, stage=2, kl_coef=0.1)
    for name in ("deep", "text"):
        arguments = {"model": models[name], "old": str(ranks.folder / f"{name}.npz")}
        ranks.add(
            f"{name}_pair", "update", **arguments, cut=SHARED, stage=3, save=str(ranks.folder / f"{name}_model_3")
        )
    ranks.add("taught_pair", "supervise", model=models["vl"], cut=SHARED, stage=3)
    for stage in stages:
        ranks.add(f"unbroken_{stage}", "unbroken", **vl, folder=str(ranks.folder / f"checkpoint_{stage}"), stage=stage)
    bf16 = {"folder": str(ranks.folder / "checkpoint_bf16"), "stage": 2, "dtype": "bf16"}
    ranks.add("unbroken_bf16", "unbroken", **vl, **bf16)
    ranks.run(2)

    for stage in stages:
        ranks.add(
            f"continued_{stage}", "continued", **vl, folder=str(ranks.folder / f"checkpoint_{stage}"), stage=stage
        )
    ranks.add("continued_bf16", "continued", **vl, **bf16)
    ranks.add("continued_away", "continued", **vl, folder=str(ranks.folder / "checkpoint_away"), **away)
    wrong = {"old": vl["old"], "folder": str(ranks.folder / "checkpoint_2"), "task": "continued"}
    ranks.add("wrong_model", "fails", **wrong, model=models["deep"], stage=2)
    ranks.add("wrong_stage", "fails", **wrong, model=models["vl"], stage=3)
    ranks.add("wrong_parts", "fails", **wrong, model=models["vl"], stage=2, freeze_visual_encoder=True)
    ranks.add(
        "no_checkpoint", "fails", **wrong | {"folder": str(ranks.folder / "nowhere")}, model=models["vl"], stage=2
    )
    ranks.run(2)
    return ranks


def _add_buffers(ranks: Ranks, models: dict[str, str], stages: Sequence[int]) -> None:
    sharp = sharpened(Path(models["vl"]), ranks.folder / "sharp")
    for stage in stages:
        ranks.add(f"built_{stage}", "built", models=models, stage=stage)
        for dtype in ("bf16", "fp32"):
            ranks.add(f"far_{dtype}_{stage}", "far", model=sharp, stage=stage, dtype=dtype)


@pytest.mark.parametrize("model", ["vl", "deep", "text"])
def test_every_layout_and_the_reference_give_the_same_logprobs(runs: Ranks, model: str) -> None:
    result = runs.tensors(model)
    for i in range(10):
        assert result[f"padded.{i}"].min() < -1
        for layout in ("shared", "packed"):
            np.testing.assert_allclose(result[f"{layout}.{i}"], result[f"padded.{i}"], atol=2e-6)
        for name in ("reference", "again"):
            assert np.array_equal(result[f"{name}.{i}"], result[f"shared.{i}"])


@pytest.mark.parametrize("stage", [*STAGES, pytest.param(PROVEN_AT_LENGTH, marks=pytest.mark.prove)])
@pytest.mark.parametrize("cut", ["alone", "alone_many", "pair"])
def test_a_step_does_not_depend_on_ranks_packs_or_stage(runs: Ranks, cut: str, stage: int) -> None:
    runs.assert_close(f"{cut}_{stage}", "vl_alone")
    assert runs.json(f"{cut}_{stage}")["steps"][1]["policy/loss"] == pytest.approx(
        runs.json("vl_alone")["steps"][1]["policy/loss"], abs=1e-5
    )


@pytest.mark.parametrize("name", ["alone_packed", "pair_many_2", "pair_many_3", "pair_shared_3", "pair_shared_many_3"])
def test_any_layout_with_any_micro_batches_and_fillers_makes_the_same_step(runs: Ranks, name: str) -> None:
    runs.assert_close(name, "vl_alone")


@pytest.mark.parametrize("stage", [*STAGES, pytest.param(PROVEN_AT_LENGTH, marks=pytest.mark.prove)])
def test_every_buffer_is_that_of_a_model_built_without_zero(runs: Ranks, stage: int) -> None:
    plain = runs.tensors("built_0")
    # Vision tower and language model of two families, language model of a third, each with and without a value head.
    assert len(plain) == 2 * 2 * (2 + 2 + 1)
    assert all("torch.float32" in name for name in plain)
    for name in ("built", "far_bf16"):
        result, wanted = runs.tensors(f"{name}_{stage}"), runs.tensors(f"{name}_0")
        assert result.keys() == wanted.keys()
        for buffer in result.keys() - {"logprobs"}:
            assert np.array_equal(result[buffer], wanted[buffer]), buffer


@pytest.mark.parametrize("stage", [*STAGES, pytest.param(PROVEN_AT_LENGTH, marks=pytest.mark.prove)])
def test_tokens_two_thousand_apart_are_scored_alike_on_every_stage(runs: Ranks, stage: int) -> None:
    exact, rough = (runs.tensors(f"far_{dtype}_0")["logprobs"] for dtype in ("fp32", "bf16"))
    np.testing.assert_allclose(runs.tensors(f"far_fp32_{stage}")["logprobs"], exact, rtol=0, atol=1e-5)
    # bf16 frequencies would move them four times as far as bf16 weights do: 0.044 instead of 0.012 on average.
    noise = np.abs(rough - exact)
    moved = np.abs(runs.tensors(f"far_bf16_{stage}")["logprobs"] - rough)
    assert moved.mean() <= noise.mean() / 2
    assert moved.max() <= noise.max()


@pytest.mark.parametrize(
    ("name", "yardstick", "calls"),
    [
        ("frozen_kept", "frozen", [4, 0]),
        # Rank 0 has cached its images and the other has not. Under ZeRO-3 either both run the tower, or neither does.
        ("frozen_pair_2", "frozen", [2, 0]),
        ("frozen_pair_3", "frozen", [3, 0]),
        ("frozen_pair_deep", "frozen_deep", [3, 0]),
    ],
)
def test_a_frozen_tower_runs_once_per_image_and_the_step_is_the_same(
    runs: Ranks, name: str, yardstick: str, calls: list[int]
) -> None:
    runs.assert_close(name, yardstick)
    assert [step["vision/tower_calls"] for step in runs.json(name)["steps"]] == calls
    # Two responses each to prompts with one, two and one image, each sample in a separate pack.
    assert [step["vision/tower_calls"] for step in runs.json(yardstick)["steps"]] == [8, 8]


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_every_aggregation_is_independent_of_the_cut(runs: Ranks, aggregation: str) -> None:
    runs.assert_close(f"pair_{aggregation}", f"alone_{aggregation}")
    assert runs.json(f"pair_{aggregation}")["steps"][0]["policy/kl_loss"] > 0


@pytest.mark.parametrize("name", ["deep", "text"])
def test_other_families_tied_embeddings_included_make_the_same_step(runs: Ranks, name: str) -> None:
    runs.assert_close(f"{name}_pair", f"{name}_alone")


@pytest.mark.parametrize("name", ["recomputed", "recomputed_reentrant", "offloaded", "offloaded_3", "away_pair"])
def test_saving_memory_does_not_change_the_step(runs: Ranks, name: str) -> None:
    runs.assert_close(name, "vl_alone")


@pytest.mark.parametrize(("name", "other"), [("away_frozen", "frozen_pair_3"), ("away_bf16", "pair_bf16_3")])
def test_weights_in_main_memory_take_the_same_steps(runs: Ranks, name: str, other: str) -> None:
    runs.assert_close(name, other)


def test_a_step_moves_every_part_and_the_step_is_large_enough_to_be_compared(
    runs: Ranks, models: dict[str, str]
) -> None:
    from safetensors.numpy import load_file

    start, end = load_file(Path(models["vl"]) / "model.safetensors"), runs.tensors("vl_alone")
    assert start.keys() == end.keys()
    moved = {name: float(np.abs(end[name] - start[name]).max()) for name in start}
    assert min(v for name, v in moved.items() if "k_proj.bias" not in name and "qkv.bias" not in name) > 1e-5, moved


def test_frozen_parts_do_not_move_and_have_no_optimizer_state(runs: Ranks, models: dict[str, str]) -> None:
    from safetensors.numpy import load_file

    start, end = load_file(Path(models["vl"]) / "model.safetensors"), runs.tensors("frozen")
    moved = {name for name in start if not np.array_equal(start[name], end[name])}
    assert not any("visual" in name for name in moved)
    language = [name for name in start if "visual" not in name]
    assert len(moved) >= len(language) - 2
    result = runs.json("frozen")
    trained = sum(row[1] for row in result["table"])
    assert trained == sum(start[name].size for name in language)
    # Two moments per trained parameter, and a step count per parameter group.
    assert 2 * trained <= result["state"] <= 2 * trained + 64


def test_metrics_say_what_happened(runs: Ranks) -> None:
    first, second = runs.json("pair_2")["steps"]
    assert first["policy/lr"] == 0.01
    assert second["policy/lr"] < 0.01
    assert 0 < first["policy/clip_fraction"] < 1
    assert 0 < first["policy/entropy"] < np.log(384)
    assert first["policy/kl_old"] > 0
    assert first["policy/ratio_max"] > 1
    assert first["policy/grad_norm"] > 0.5
    assert first["pack/padding_fraction"] == 0
    # Groups of one, two and one image: the tower encodes each image once per step, because it is trained.
    assert first["vision/tower_calls"] == second["vision/tower_calls"] == 4
    assert first["vision/cache_hits"] == 0
    # Each prompt is stored once per group of two.
    assert 0.3 < first["pack/shared_fraction"] < 0.5
    padded = runs.json("vl_alone")["steps"][0]
    assert padded["pack/shared_fraction"] == 0
    for name in ("policy/clip_fraction", "policy/entropy", "policy/kl_old", "policy/ratio_max", "policy/grad_norm"):
        assert first[name] == pytest.approx(padded[name], rel=1e-3), name


def test_supervised_training_learns_alone_and_in_pairs_alike(runs: Ranks) -> None:
    losses = [step["policy/loss"] for step in runs.json("taught")["steps"]]
    assert losses[0] > losses[1] > losses[2]
    runs.assert_close("taught_pair", "taught")


@pytest.mark.parametrize("stage", [*STAGES, pytest.param(PROVEN_AT_LENGTH, marks=pytest.mark.prove)])
def test_bf16_with_fp32_master_weights_follows_fp32(runs: Ranks, stage: int) -> None:
    rough, exact = runs.json(f"pair_bf16_{stage}")["steps"], runs.json("vl_alone")["steps"]
    assert rough[1]["policy/loss"] == pytest.approx(exact[1]["policy/loss"], abs=0.05)
    assert rough[0]["policy/grad_norm"] == pytest.approx(exact[0]["policy/grad_norm"], rel=0.1)
    runs.assert_close(f"pair_bf16_{stage}", "vl_alone", tolerance=5e-3)


@pytest.mark.parametrize("stage", [*STAGES, pytest.param(PROVEN_AT_LENGTH, marks=pytest.mark.prove)])
def test_bf16_on_any_stage_can_be_asked_in_fp32_and_its_layouts_are_equal(runs: Ranks, stage: int) -> None:
    result = runs.json(f"pair_bf16_{stage}_proof")
    assert 1e-4 < result["rounding"] < 0.03
    assert set(result["layouts"]) == {"packed", "shared"}
    assert max(gap for gaps in result["layouts"].values() for gap in gaps) < 5e-6


@pytest.mark.parametrize(
    "name",
    [
        *(f"unbroken_{s}" for s in (*STAGES, "bf16", "away")),
        pytest.param(f"unbroken_{PROVEN_AT_LENGTH}", marks=pytest.mark.prove),
    ],
)
def test_a_continued_run_equals_an_unbroken_one_bit_for_bit(runs: Ranks, name: str) -> None:
    for rank in (0, 1):
        unbroken = runs.json(f"{name}.{rank}")
        continued = runs.json(f"{name.replace('unbroken', 'continued')}.{rank}")
        assert continued.pop("extra") == {"step": 2, "note": "é"}
        unbroken.pop("extra")
        assert continued == unbroken
        assert len(unbroken["optimizer"]) > 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_model", "checkpoint of another model"),
        ("wrong_stage", "written with ds.zero_stage 2, this run has 3"),
        ("wrong_parts", "trained other parts of the model"),
        ("no_checkpoint", "not a readable checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(runs: Ranks, name: str, words: str) -> None:
    kind, line = runs.json(name)
    assert kind == "ConfigError"
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_or_gradient_that_is_no_number_stops_the_run_and_names_the_step(
    runs: Ranks, where: str, stage: int
) -> None:
    kind, line = runs.json(f"poisoned_{where}_{stage}")
    assert kind == "VlmrlError"
    assert f"{where} of optimizer step 3" in line


@pytest.mark.parametrize(
    ("folder", "weights"),
    [
        ("vl_model", "vl_alone"),
        *((f"model_{stage}", f"pair_{stage}") for stage in STAGES),
        pytest.param(f"model_{PROVEN_AT_LENGTH}", f"pair_{PROVEN_AT_LENGTH}", marks=pytest.mark.prove),
        ("deep_model_3", "deep_pair"),
        ("text_model_3", "text_pair"),
    ],
)
def test_a_saved_model_loads_with_exactly_the_weights_that_are_synced(runs: Ranks, folder: str, weights: str) -> None:
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    from vlmrl.learning.weights import checkpoint_names, saved_tensors

    path = runs.folder / folder
    synced, written = runs.tensors(weights), load_file(path / "model.safetensors")
    assert written.keys() == synced.keys()
    factory = AutoModelForCausalLM if folder.startswith("text") else AutoModelForImageTextToText
    net, report = factory.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    loaded = dict(checkpoint_names(net, saved_tensors(net)))
    for name, tensor in synced.items():
        assert np.array_equal(written[name], tensor), name
        assert np.array_equal(loaded[name].detach().numpy(), tensor), name
    assert AutoTokenizer.from_pretrained(path).encode("a") == [97]
    assert folder.startswith("text") or AutoProcessor.from_pretrained(path).image_processor is not None
    assert not list(runs.folder.glob("*.tmp"))


_JOIN = """
from vlmrl.errors import ClusterError
from vlmrl.learning.deepspeed_engine import init_distributed
try:
    init_distributed(2)
except ClusterError as error:
    print("line:", error)
"""


@pytest.mark.parametrize(("is_taken", "words"), [(True, "Address already in use"), (False, "waiting for clients")])
def test_a_taken_port_and_a_rank_that_never_comes_are_one_line_each(is_taken: bool, words: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if is_taken:
            other.listen()
        else:
            other.close()
        place = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        done = subprocess.run(
            [python(), "-c", _JOIN],
            env=os.environ | place,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("line:")]
    assert len(lines) == 1
    assert f"rank 0 of 2 could not join the training ranks at 127.0.0.1:{port}" in lines[0]
    assert words in lines[0]
