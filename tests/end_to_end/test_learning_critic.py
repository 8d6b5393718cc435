"""Real DeepSpeed on CPU: gradients do not depend on how a step is split; critics learn, alone or with a policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from critic_rank import CUTS, KL_COEF, LOSSES
from ranks import Ranks

STAGES = (0, 2, 3)
FROZEN = {"freeze_visual_encoder": True, "freeze_projector": True}
EVERY = [*LOSSES, "value"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("models")
    return {
        name: str(build("qwen2_5_vl", folder / name, size="micro", tied=False, seed=seed))
        for name, seed in (("vl", 3), ("other", 4))
    }


@pytest.fixture(scope="module")
def runs(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of all jobs: one launch with a single rank, one with two ranks."""
    ranks = Ranks(tmp_path_factory.mktemp("runs"), Path(__file__).with_name("critic_rank.py"))
    vl = {"model": models["vl"], "old": str(ranks.folder / "vl.npz")}
    ranks.add("vl", "score", model=models["vl"])
    ranks.add("gradients", "gradients", **vl)
    ranks.add("alone", "value", **vl, cut="padded_many", save=str(ranks.folder / "saved"))
    ranks.add("taught", "value", **vl, cut="shared_one", steps=8, lr=0.001, value_clip=None)
    ranks.add("lora_alone", "value", **vl, cut="padded_many", lora={}, save=str(ranks.folder / "saved_adapter"))
    ranks.add("nf4_alone", "value", **vl, cut="padded_many", lora={}, four_bit=True)
    ranks.add("frozen_alone", "value", **vl, cut="padded_many", steps=1, **FROZEN)
    ranks.add("frozen_policy", "update", **vl, cut=CUTS["padded_many"], steps=1, kl_coef=KL_COEF, **FROZEN)
    ranks.add("both", "pair", **vl, other=models["vl"], cut="shared_one", stage=2, critic_stage=2, **FROZEN)
    ranks.add("strangers", "pair", **vl, other=models["other"], cut="shared_one", **FROZEN)
    ranks.add("thawed", "pair", **vl, other=models["vl"], cut="shared_one")
    ranks.run(1)

    ranks.add("gradients_pair", "gradients", **vl)
    for stage in STAGES:
        cut = "packed_many" if stage == 3 else "shared_one"
        ranks.add(f"pair_{stage}", "value", **vl, cut=cut, stage=stage, save=str(ranks.folder / f"saved_{stage}"))
    ranks.add("again_2", "value", **vl, cut="shared_one", stage=2, again=str(ranks.folder / "again_2"))
    ranks.add("again_3", "value", **vl, cut="shared_one", stage=3, lora={}, again=str(ranks.folder / "again_3"))
    ranks.add("lora_3", "value", **vl, cut="shared_one", stage=3, lora={})
    for stage in (2, 3):
        ranks.add(f"nf4_{stage}", "value", **vl, cut="shared_one", stage=stage, lora={}, four_bit=True)
    ranks.add("bf16", "value", **vl, cut="shared_one", stage=3, dtype="bf16")
    ranks.add("both_pair", "pair", **vl, other=models["vl"], cut="shared_one", stage=3, critic_stage=2, **FROZEN)
    for name, bound in (("none", None), ("tight", 1e-9), ("loose", 100.0)):
        ranks.add(f"stop_{name}", "stop", **vl, bound=bound)
    for name, more in (
        ("average_2", {"stage": 2}),
        ("average_3", {"stage": 3}),
        ("average_lora", {"stage": 2, "lora": {}}),
    ):
        ranks.add(name, "average", **vl, **more)
    for stage in STAGES:
        ranks.add(f"retuned_{stage}", "retuned", **vl, stage=stage)
    ranks.add("retuned_bf16", "retuned", **vl, stage=0, dtype="bf16")
    ranks.run(2)
    return ranks


@pytest.mark.parametrize("loss", EVERY)
def test_a_gradient_does_not_depend_on_ranks_micro_batches_or_layout(runs: Ranks, loss: str) -> None:
    alone, pair = runs.tensors("gradients"), runs.tensors("gradients_pair")
    yardstick = alone[f"{loss}.padded_one"]
    scale = float(np.abs(yardstick).max())
    assert scale > 1e-3
    for cut in CUTS:
        for result in (alone, pair):
            np.testing.assert_allclose(result[f"{loss}.{cut}"], yardstick, atol=2e-5 * scale)


def test_every_loss_has_a_gradient_of_its_own(runs: Ranks) -> None:
    result = [runs.tensors("gradients")[f"{loss}.padded_one"] for loss in LOSSES]
    for i, one in enumerate(result):
        for other in result[:i]:
            assert np.abs(one - other).max() > 0.05 * np.abs(one).max()


@pytest.mark.parametrize("name", [f"pair_{stage}" for stage in STAGES])
def test_a_critic_takes_the_same_steps_on_every_stage(runs: Ranks, name: str) -> None:
    runs.assert_close(name, "alone")
    alone, pair = runs.tensors("alone.values"), runs.tensors(f"{name}.values")
    assert len(alone) == 20
    for key, row in alone.items():
        np.testing.assert_allclose(pair[key], row, atol=5e-6)


def test_a_critic_says_values_of_sampled_tokens_and_moves_them_towards_the_returns(runs: Ranks) -> None:
    result, steps = runs.tensors("taught.values"), runs.json("taught")["steps"]
    moved = [result[f"after.{i}"].sum() - result[f"before.{i}"].sum() for i in range(10)]
    # The returns are 1 on average, and the initial values are about 0.
    assert min(moved) > 0
    losses = [step["value/loss"] for step in steps]
    assert losses == sorted(losses, reverse=True)
    assert {step["value/clip_fraction"] for step in steps} == {0.0}
    # Sampled tokens come last; prompt tokens have no values.
    assert all(row[0] == 0 and row[-1] != 0 for row in result.values())


def test_metrics_of_a_critic_do_not_depend_on_the_cut(runs: Ranks) -> None:
    for one, other in zip(runs.json("alone")["steps"], runs.json("pair_2")["steps"], strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"vision/tower_calls", "value/clip_fraction"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3), name
        # One of 55 tokens may lie on the bound.
        assert one["value/clip_fraction"] == pytest.approx(other["value/clip_fraction"], abs=1.5 / 55)
        assert {"value/loss", "value/clip_fraction", "value/grad_norm", "value/lr"} < one.keys()
        # Values of 0.3 times noise against returns of noise around 1.
        assert -0.5 < one["value/explained_variance"] < 0.5


def test_a_critic_under_an_adapter_trains_that_and_its_head(runs: Ranks, models: dict[str, str]) -> None:
    from safetensors.numpy import load_file

    runs.assert_close("lora_3", "lora_alone")
    start, end = load_file(Path(models["vl"]) / "model.safetensors"), runs.tensors("lora_alone")
    assert all(
        np.array_equal(end[name.replace("lm_head", "score")], start[name]) for name in start if "head" not in name
    )
    assert end["score.weight"].any()
    written = load_file(runs.folder / "saved_adapter" / "adapter_model.safetensors")
    assert np.array_equal(written["base_model.model.score.weight"], end["score.weight"])
    assert sum("lora_B" in name and tensor.any() for name, tensor in written.items()) >= 7


@pytest.mark.parametrize("stage", [2, 3])
def test_a_critic_in_4_bits_learns_alike_on_one_rank_and_sharded_over_two(runs: Ranks, stage: int) -> None:
    alone, pair = runs.tensors("nf4_alone.values"), runs.tensors(f"nf4_{stage}.values")
    assert alone.keys() == pair.keys()
    for name, row in alone.items():
        np.testing.assert_allclose(pair[name], row, atol=1e-5)
    assert max(np.abs(alone[f"after.{i}"] - alone[f"before.{i}"]).max() for i in range(2)) > 1e-3
    full = runs.tensors("lora_alone.values")
    assert max(np.abs(alone[f"after.{i}"] - full[f"after.{i}"]).max() for i in range(2)) > 1e-5, (
        "4 bits are another base"
    )


def test_bf16_follows_fp32(runs: Ranks) -> None:
    runs.assert_close("bf16", "alone", tolerance=5e-3)


@pytest.mark.parametrize(("folder", "weights"), [("saved", "alone"), *((f"saved_{s}", f"pair_{s}") for s in STAGES)])
def test_a_saved_critic_is_what_another_can_start_from(runs: Ranks, folder: str, weights: str) -> None:
    import torch

    from vlmrl.learning.weights import checkpoint_names, saved_tensors
    from vlmrl.models.value_head import value_net

    net = value_net(str(runs.folder / folder), dtype=torch.float32, attn_implementation="sdpa", head_seed=None)
    loaded = dict(checkpoint_names(net, saved_tensors(net)))
    expected = runs.tensors(weights)
    assert expected.keys() == loaded.keys()
    assert all(np.array_equal(loaded[name].detach().numpy(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["both", "both_pair"])
def test_with_frozen_towers_of_the_same_weights_each_image_is_seen_once_by_both(runs: Ranks, name: str) -> None:
    """Log-probs, values, a step of the policy, a step of the critic."""
    result = runs.json(name)
    assert result["shares"]
    assert result["towers"] == [4, 0, 0, 0]
    both = runs.tensors(name)
    for role, yardstick in (("policy", "frozen_policy"), ("critic", "frozen_alone")):
        result = {n.removeprefix(f"{role}."): tensor for n, tensor in both.items() if n.startswith(f"{role}.")}
        alone = runs.tensors(yardstick)
        assert result.keys() == alone.keys()
        assert max(float(np.abs(result[n] - alone[n]).max()) for n in alone) < 1e-6


def test_towers_of_other_weights_keep_what_they_see_to_themselves(runs: Ranks) -> None:
    result = runs.json("strangers")
    assert not result["shares"]
    assert result["towers"] == [4, 4, 0, 0]


def test_towers_that_train_see_everything_anew(runs: Ranks) -> None:
    result = runs.json("thawed")
    assert not result["shares"]
    assert result["towers"] == [4, 4, 4, 4]


def test_an_update_stops_on_all_ranks_where_the_policy_has_gone_too_far(runs: Ranks) -> None:
    for name in ("none", "loose"):
        steps = runs.json(f"stop_{name}")["steps"]
        assert len(steps) == 2
        assert not any("policy/stopped_early" in step for step in steps)
    # The first step is on-policy: the weights have not changed since the log-probs were computed.
    (stopped,) = runs.json("stop_tight")["steps"]
    assert stopped["policy/stopped_early"] == 1
    assert stopped["policy/kl_old"] < 1e-9 < runs.json("stop_none")["steps"][1]["policy/kl_old"]


@pytest.mark.parametrize("stage", [*STAGES, "bf16"])
def test_who_goes_on_from_a_checkpoint_moves_by_the_settings_of_now(runs: Ranks, stage: int | str) -> None:
    result = runs.json(f"retuned_{stage}")
    # In fp32 at stage 0, vlmrl clips the gradient itself.
    assert result["clip"] == (None if stage == 0 else 0.25)
    # Each step is a tenth of the run: two were taken before the checkpoint, at a ten times higher learning rate.
    assert [step["policy/lr"] for step in result["steps"]] == pytest.approx([0.0008, 0.0007])
    assert {group["weight_decay"] for group in result["groups"]} == {0.5, 0.0}
    assert all((group["eps"], group["betas"]) == (1e-2, [0.5, 0.75]) for group in result["groups"])
    assert "was written with actor.optim adam, this run has muon" in result["refused"]


@pytest.mark.parametrize("name", ["average_2", "average_3", "average_lora"])
def test_the_moving_average_is_saved_and_goes_on_from_a_checkpoint(runs: Ranks, name: str) -> None:
    from safetensors.numpy import load_file

    held, file = runs.tensors(name), "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    saved, again = (load_file(runs.folder / f"{name}_{which}" / file) for which in ("saved", "again"))
    assert saved.keys() == again.keys() == {n.removeprefix("0.") for n in held if n.startswith("0.")}
    for key, tensor in saved.items():
        first, second, third = (held[f"{n}.{key}"] for n in range(3))
        # Twice: 3/4 of the old average plus 1/4 of the current weights.
        np.testing.assert_allclose(tensor, 9 / 16 * first + 3 / 16 * second + 1 / 4 * third, atol=1e-6)
        assert np.array_equal(tensor, again[key])
    assert any(np.abs(saved[key] - held[f"2.{key}"]).max() > 1e-3 for key in saved)
    assert "was written without a moving average" in runs.json(name)["refused"]
