"""Adapters under real DeepSpeed on CPU: all stages take the same step, the base does not change, runs resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_rank import PACKED, PADDED, SHARED
from ranks import Ranks

STAGES = (0, 1, 2, 3)
FROZEN = {"freeze_visual_encoder": True, "freeze_projector": True}
KINDS: dict[str, dict[str, Any]] = {"lora": {"lora": {}}, "nf4": {"lora": {}, "four_bit": True}}
MODELS = ("vl", "deep", "text")
SCALING = 8.0 / 4
PROVEN_AT_LENGTH = {
    *("deep_lora", "text_nf4", "recomputed"),
    *("lora_1", "nf4_0", "nf4_1", "deep_lora_3", "text_nf4_3", "dora_2", "bf16_2"),
    *(f"{part}_{run}" for part in ("unbroken", "continued") for run in ("lora_0", "nf4_0", "nf4_2")),
}
"""Jobs of `make prove` only: further combinations of what the other jobs have."""


def jobs(*names: str) -> list[Any]:
    """Return parameters of a test, a job each."""
    return [pytest.param(name, marks=pytest.mark.prove) if name in PROVEN_AT_LENGTH else name for name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("models")
    made: list[tuple[str, Any, bool, int]] = [
        ("vl", "qwen2_5_vl", False, 3),
        ("deep", "qwen3_vl", True, 3),
        ("text", "qwen3", True, 3),
        ("other", "qwen2_5_vl", False, 4),
    ]
    return {
        name: str(build(family, folder / name, size="micro", tied=tied, seed=seed)) for name, family, tied, seed in made
    }


@pytest.fixture(scope="module")
def runs(models: dict[str, str], proves: bool, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of all jobs: one rank, two ranks, and two ranks that resume."""
    ranks = Ranks(tmp_path_factory.mktemp("runs"), skipped=set() if proves else PROVEN_AT_LENGTH)
    arguments = {name: {"model": models[name], "old": str(ranks.folder / f"{name}.npz")} for name in MODELS}
    for name in MODELS:
        ranks.add(name, "score", model=models[name])
        for kind, options in KINDS.items():
            ranks.add(
                f"{name}_{kind}", "adapt", **arguments[name], cut=PADDED, save=folder(ranks, name, kind), **options
            )
    vl = arguments["vl"]
    ranks.add("dora", "adapt", **vl, cut=PADDED, lora={"use_dora": True}, save=str(ranks.folder / "dora_adapter"))
    dora_nf4: dict[str, Any] = {"lora": {"use_dora": True}, "four_bit": True}
    ranks.add("dora_nf4", "adapt", **vl, cut=PADDED, **dora_nf4)
    everything = {"target_modules": ["all"], "use_rslora": True}
    ranks.add("everything", "adapt", **vl, cut=PADDED, lora=everything)
    ranks.add("towerless", "adapt", **vl, cut=SHARED, lora=everything, steps=10, **FROZEN)
    ranks.add("recomputed", "adapt", **vl, cut=SHARED, **KINDS["nf4"], gradient_checkpointing_enable=True)
    reentrant = {"gradient_checkpointing_enable": True, "gradient_checkpointing_reentrant": True}
    ranks.add("recomputed_reentrant", "adapt", **vl, cut=SHARED, **KINDS["lora"], **reentrant)
    ranks.run(1)

    for kind, options in KINDS.items():
        for stage in STAGES:
            ranks.add(f"{kind}_{stage}", "adapt", **vl, cut=PACKED if stage == 3 else SHARED, stage=stage, **options)
        for name in ("deep", "text"):
            ranks.add(f"{name}_{kind}_3", "adapt", **arguments[name], cut=SHARED, stage=3, **options)
        for stage in (0, 2, 3):
            checkpoint = str(ranks.folder / f"{kind}_checkpoint_{stage}")
            ranks.add(f"unbroken_{kind}_{stage}", "unbroken", **vl, folder=checkpoint, stage=stage, **options)
    for stage in (2, 3):
        ranks.add(f"dora_{stage}", "adapt", **vl, cut=SHARED, lora={"use_dora": True}, stage=stage)
        ranks.add(f"everything_{stage}", "adapt", **vl, cut=SHARED, lora=everything, stage=stage)
        ranks.add(f"bf16_{stage}", "adapt", **vl, cut=SHARED, dtype="bf16", stage=stage, **KINDS["nf4"])
    ranks.add("dora_nf4_2", "adapt", **vl, cut=SHARED, stage=2, **dora_nf4)
    checkpointing = {"gradient_checkpointing_enable": True}
    ranks.add("recomputed_3", "adapt", **vl, cut=SHARED, stage=3, **checkpointing, **KINDS["nf4"])
    ranks.run(2)

    for kind, options in KINDS.items():
        for stage in (0, 2, 3):
            checkpoint = str(ranks.folder / f"{kind}_checkpoint_{stage}")
            ranks.add(f"continued_{kind}_{stage}", "continued", **vl, folder=checkpoint, stage=stage, **options)
    wrong = {"task": "continued", "old": vl["old"], "stage": 2, "folder": str(ranks.folder / "lora_checkpoint_2")}
    ranks.add("wrong_base", "fails", **wrong, model=models["other"], lora={})
    ranks.add("wrong_alpha", "fails", **wrong, model=models["vl"], lora={"alpha": 9.0})
    ranks.add("wrong_bits", "fails", **wrong, model=models["vl"], lora={}, four_bit=True)
    ranks.add("no_adapter", "fails", **wrong, model=models["vl"])
    ranks.add("wrong_layers", "fails", **wrong, model=models["vl"], lora={"target_modules": ["q_proj"]})
    for stage in (2, 3):
        damaged = damage(ranks.folder / f"lora_checkpoint_{stage}")
        ranks.add(f"lost_{stage}", "fails", **wrong | {"stage": stage, "folder": damaged}, model=models["vl"], lora={})
    adapter = {"adapter_name_or_path": folder(ranks, "vl", "lora")}
    ranks.add("went_on", "adapt", **vl, cut=SHARED, lora={}, stage=3, steps=0, **adapter)
    refused = {"task": "adapt", "old": vl["old"], "cut": SHARED}
    ranks.add("adapter_of_another", "fails", **refused, model=models["other"], lora={}, **adapter)
    ranks.add("adapter_of_bits", "fails", **refused, model=models["vl"], **KINDS["nf4"], **adapter)
    ranks.add("dora_nf4_3", "fails", **refused, model=models["vl"], stage=3, lora={"use_dora": True}, four_bit=True)
    ranks.add("adapter_of_alpha", "fails", **refused, model=models["vl"], lora={"alpha": 9.0}, **adapter)
    ranks.run(2)
    return ranks


def folder(ranks: Ranks, name: str, kind: str) -> str:
    return str(ranks.folder / f"{name}_{kind}_adapter")


def damage(checkpoint: Path) -> str:
    """Copy a checkpoint without one tensor of the adapter."""
    import torch

    copy = checkpoint.with_name(f"{checkpoint.name}_damaged")
    shutil.copytree(checkpoint, copy)
    states = sorted(copy.glob("deepspeed/*model_states.pt"))
    assert states
    for file in states:
        state = torch.load(file, weights_only=False)
        lost = next(name for name in state["module"] if "layers.1.self_attn.v_proj.lora_B" in name)
        del state["module"][lost]
        torch.save(state, file)
    return str(copy)


def part(runs: Ranks, name: str, what: str) -> dict[str, np.ndarray]:
    return runs.tensors(f"{name}.{what}")


def started(models: dict[str, str], name: str) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(Path(models[name]) / "model.safetensors")


def assert_equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    assert one.keys() == two.keys()
    worst = max((float(np.abs(one[k] - two[k]).max()), k) for k in one)
    assert worst[0] <= tolerance, worst


def logprobs_of(runs: Ranks, name: str, kind: str) -> dict[str, np.ndarray]:
    prefix = f"{kind}."
    arrays = runs.tensors(f"{name}.logprobs")
    return {key.removeprefix(prefix): row for key, row in arrays.items() if key.startswith(prefix)}


ALL = [
    *(f"{name}_{kind}" for name in MODELS for kind in KINDS),
    *(f"{kind}_{stage}" for kind in KINDS for stage in STAGES),
    *(f"{name}_{kind}_3" for name in ("deep", "text") for kind in KINDS),
    *("dora", "dora_nf4", "dora_nf4_2", "everything", "dora_2", "dora_3", "everything_2", "everything_3"),
    *("recomputed", "recomputed_reentrant", "recomputed_3", "towerless"),
]


@pytest.mark.parametrize("name", jobs(*ALL))
def test_with_its_adapter_off_a_policy_says_what_its_base_said_before(runs: Ranks, name: str) -> None:
    start, off, on = (logprobs_of(runs, name, kind) for kind in ("start", "off", "on"))
    assert_equal(logprobs_of(runs, name, "start_off"), start, 1e-6)
    assert_equal(off, start, 1e-6)
    assert max(float(np.abs(on[i] - off[i]).max()) for i in on) > 1e-3
    assert runs.json(name)["zero"] == [True, False]


@pytest.mark.parametrize("name", jobs(*(f"{name}_{kind}" for name in MODELS for kind in KINDS)))
def test_the_base_under_an_adapter_is_the_model_itself(runs: Ranks, name: str) -> None:
    model, _, kind = name.partition("_")
    alone = {key.removeprefix("padded."): row for key, row in runs.tensors(model).items() if key.startswith("padded.")}
    base = logprobs_of(runs, name, "off")
    if kind == "lora":
        assert_equal(base, alone, 1e-6)
    else:
        assert max(float(np.abs(base[i] - alone[i]).max()) for i in alone) > 1e-3


@pytest.mark.parametrize("name", jobs(*ALL))
def test_no_bit_of_the_base_changes(runs: Ranks, models: dict[str, str], name: str) -> None:
    first, last = part(runs, name, "base_at_first"), part(runs, name, "base")
    assert_equal(first, last)
    files = started(models, next((m for m in ("deep", "text") if name.startswith(m)), "vl"))
    assert first.keys() == files.keys()
    differ = {key for key in files if not np.array_equal(files[key], first[key])}
    is_rounded = "nf4" in name or name in ("recomputed", "recomputed_3")
    linears = {k for k in files if k.endswith("_proj.weight") and "visual" not in k}
    assert differ == (linears if is_rounded else set())


@pytest.mark.parametrize("name", jobs(*(n for n in ALL if not n.startswith(("dora", "everything", "towerless")))))
def test_the_whole_model_is_the_base_and_what_the_adapter_adds(runs: Ranks, name: str) -> None:
    base, whole, adapter = (part(runs, name, what) for what in ("base", "whole", "adapter"))
    assert base.keys() == whole.keys()
    added = {
        key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): SCALING * (b @ adapter[key])
        for key in adapter
        if (b := adapter.get(key.replace("lora_A", "lora_B"))) is not None and "lora_A" in key
    }
    assert len(added) == 14
    touched = 0
    for key, was in base.items():
        # The checkpoint's names equal those in memory, except for the position of `language_model`.
        layer = key.removesuffix(".weight").replace("language_model.", "")
        more = next((v for k, v in added.items() if k.replace("language_model.", "") == layer), None)
        touched += more is not None
        np.testing.assert_allclose(whole[key], was if more is None else was + more, atol=1e-6, err_msg=key)
    assert touched == 14
    assert_equal(part(runs, name, "whole_at_first"), base)


@pytest.mark.parametrize("name", jobs(*(f"{kind}_{stage}" for kind in KINDS for stage in STAGES)))
def test_an_adapters_step_does_not_depend_on_ranks_packs_or_stage(runs: Ranks, name: str) -> None:
    alone = f"vl_{name.partition('_')[0]}"
    assert_equal(part(runs, name, "adapter"), part(runs, alone, "adapter"), 1e-5)
    loss = [runs.json(job)["passes"][1]["policy/loss"] for job in (name, alone)]
    assert loss[0] == pytest.approx(loss[1], abs=1e-5)


YARDSTICKS = {
    **{f"{name}_{kind}_3": f"{name}_{kind}" for name in ("deep", "text") for kind in KINDS},
    **{f"{name}_{stage}": name for name in ("dora", "everything") for stage in (2, 3)},
    "dora_nf4_2": "dora_nf4",
    "recomputed": "vl_nf4",
    "recomputed_3": "vl_nf4",
    "recomputed_reentrant": "vl_lora",
}
"""The job whose step a job must take."""


@pytest.mark.parametrize("name", jobs(*YARDSTICKS))
def test_other_models_and_adapters_and_saved_memory_make_the_same_step(runs: Ranks, name: str) -> None:
    yardstick = YARDSTICKS[name]
    assert_equal(part(runs, name, "adapter"), part(runs, yardstick, "adapter"), 1e-5)


@pytest.mark.parametrize("name", jobs("bf16_2", "bf16_3"))
def test_bf16_with_4_bits_follows_fp32(runs: Ranks, name: str) -> None:
    rough, exact = runs.json(name)["passes"], runs.json("vl_nf4")["passes"]
    assert rough[1]["policy/loss"] == pytest.approx(exact[1]["policy/loss"], abs=0.05)
    assert rough[0]["policy/grad_norm"] == pytest.approx(exact[0]["policy/grad_norm"], rel=0.1)
    assert_equal(part(runs, name, "base_at_first"), part(runs, name, "base"))


def test_all_targets_and_a_frozen_tower_leave_every_bit_of_the_tower_in_ten_steps(
    runs: Ranks, models: dict[str, str]
) -> None:
    files, whole = started(models, "vl"), part(runs, "towerless", "whole")
    tower = [name for name in files if "visual" in name]
    assert len(tower) > 20
    assert all(np.array_equal(files[name], whole[name]) for name in tower)
    changed = [name for name in files if not np.array_equal(files[name], whole[name])]
    assert len(changed) == 14
    assert not any("visual" in name for name in part(runs, "towerless", "adapter"))
    assert len(runs.json("towerless")["passes"]) == 12


def test_an_adapter_on_everything_moves_the_tower_too(runs: Ranks, models: dict[str, str]) -> None:
    files, whole = started(models, "vl"), part(runs, "everything_3", "whole")
    changed = [name for name in files if not np.array_equal(files[name], whole[name])]
    assert sum("merger" in name for name in changed) == 2
    assert sum("visual.blocks" in name for name in changed) == 10
    assert len(changed) == 14 + 12


def test_images_go_through_the_tower_once_with_adapters_on_and_off_unless_it_has_one(runs: Ranks) -> None:
    # Once in the first pass; two steps and the passes with and without the adapter use the cache.
    for name in ("lora_0", "nf4_2", "lora_3"):
        calls = [step["vision/tower_calls"] for step in runs.json(name)["passes"]]
        assert calls == [0, 0, 0, 0], name
    assert all(step["vision/tower_calls"] > 0 for step in runs.json("everything_2")["passes"])


@pytest.mark.parametrize("name", jobs(*ALL))
def test_the_synced_adapter_is_reported_by_fingerprint_and_bytes(runs: Ranks, name: str) -> None:
    import torch

    from vlmrl.models.adapter_plan import adapter_fingerprint
    from vlmrl.models.weight_buckets import digest

    adapter, result = part(runs, name, "adapter"), runs.json(name)
    assert result["bytes"] == sum(tensor.nbytes for tensor in adapter.values())
    digests = {key: digest(key, torch.from_numpy(tensor)) for key, tensor in adapter.items()}
    scaling = 8.0 / 4**0.5 if name.startswith(("everything", "towerless")) else SCALING
    assert result["fingerprint"] == adapter_fingerprint(digests, scaling)
    trained = sum(row[1] for row in result["table"])
    assert trained == sum(tensor.size for tensor in adapter.values())


@pytest.mark.parametrize("name", ["vl_lora", "deep_nf4", "text_lora", "dora"])
def test_the_folder_holds_what_is_synced_and_the_run_goes_on_from_it(runs: Ranks, name: str) -> None:
    from vlmrl.models.adapter_files import read_adapter

    stored = read_adapter(runs.folder / f"{name}_adapter", flag="merge.adapter")
    synced = part(runs, name, "adapter")
    assert_equal({key: tensor.numpy() for key, tensor in stored.tensors.items()}, synced)
    assert stored.base.is_four_bit == ("nf4" in name)
    assert stored.has_magnitude == (name == "dora")
    if name == "vl_lora":
        assert_equal(part(runs, "went_on", "adapter"), synced)
        assert runs.json("went_on")["zero"] == [False, False]


@pytest.mark.parametrize("name", jobs(*(f"continued_{kind}_{stage}" for kind in KINDS for stage in (0, 2, 3))))
def test_a_continued_adapter_equals_an_unbroken_one_bit_for_bit_and_its_base_is_not_written(
    runs: Ranks, name: str
) -> None:
    _, kind, stage = name.split("_")
    for rank in (0, 1):
        unbroken = runs.json(f"unbroken_{kind}_{stage}.{rank}")
        continued = runs.json(f"{name}.{rank}")
        assert continued.pop("extra") == {"step": 2, "note": "é"}
        unbroken.pop("extra")
        assert continued == unbroken
    import torch

    for file in (runs.folder / f"{kind}_checkpoint_{stage}" / "deepspeed").glob("*model_states.pt"):
        names = torch.load(file, weights_only=False)["module"]
        assert len(names) == 14 * 2
        assert all(".lora_" in name for name in names)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_base", "adapter on other weights than those of actor.model_name_or_path"),
        ("wrong_alpha", "written with ds.lora.alpha 8.0, this run has 9.0"),
        ("wrong_bits", "written with ds.load_in_4bit False, this run has True"),
        ("no_adapter", "written with ds.lora.rank 4, this run has 0"),
        ("wrong_layers", "checkpoint of another model"),
        ("lost_2", "lacks the adapter tensor net.model.language_model.layers.1.self_attn.v_proj.lora_B"),
        ("lost_3", "lacks the adapter tensor net.model.language_model.layers.1.self_attn.v_proj.lora_B"),
        ("adapter_of_another", "was trained on other weights than those of"),
        ("adapter_of_bits", "was trained with ds.load_in_4bit false: set it so here too"),
        ("dora_nf4_3", "ds.lora.use_dora on a 4-bit base"),
        ("adapter_of_alpha", "has ds.lora.alpha 8.0, this run has 9.0: set it to 8.0"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(runs: Ranks, name: str, words: str) -> None:
    kind, line = runs.json(name)
    assert kind == "ConfigError"
    assert words in line
    assert "\n" not in line


def test_the_runs_left_nothing_half_written(runs: Ranks) -> None:
    assert not list(runs.folder.glob("*.tmp"))
    result = json.loads((runs.folder / "vl_nf4_adapter" / "base.json").read_text())
    assert result["load_in_4bit"] is True
    assert len(result["targets"]) == 14
