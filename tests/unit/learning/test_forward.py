"""Forward passes of packs: cached image features, and outputs per sample id."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sample_batches import batch, packs
from transformers import PreTrainedModel

from vlmrl.data.packing import FILLER, Pack, make_pack
from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.learning import forward as module
from vlmrl.learning.forward import LogprobForward, ValueForward
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan, choose_targets, layers
from vlmrl.models.adapters import adapter_tensors, adapters_off, inject_adapter
from vlmrl.models.attention import implementation
from vlmrl.models.load import freeze, load_model
from vlmrl.models.scorer import Scorer
from vlmrl.models.value_head import ValueModel
from vlmrl.observe.metrics import Sum
from vlmrl.plugins import Processor, processor
from vlmrl.types import Floats, Layout, Sample

torch.set_num_threads(1)

CPU = torch.device("cpu")
FAMILIES: list[tiny.Family] = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]
GIB = 2**30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny.Family], tuple[PreTrainedModel, Processor]]:
    """A new model with larger weights than usual, so that images matter, and its processor."""
    kept: dict[str, tuple[PreTrainedModel, Processor]] = {}

    def make(family: tiny.Family) -> tuple[PreTrainedModel, Processor]:
        if family not in kept:
            folder = str(tiny.build(family, tmp_path_factory.mktemp(family), size="micro"))
            net = load_model(folder, dtype=torch.float32, attn_implementation=implementation("auto", CPU))
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            kept[family] = net, processor(folder, min_pixels=3136, max_pixels=100_000)
        net, read = kept[family]
        return copy.deepcopy(net), read

    return make


class WatchedForward:
    """Forward passes that count the images of each call of the vision tower."""

    def __init__(
        self,
        made: tuple[PreTrainedModel, Processor],
        *,
        frozen: bool = True,
        cache_bytes: int = GIB,
        **options: Any,
    ) -> None:
        self.net, self.read = made
        freeze(self.net, self.read, vision=frozen, projector=frozen)
        self.calls: list[int] = []
        tower: Any = self.net.base_model.visual
        tower.register_forward_pre_hook(self._count, with_kwargs=True)
        self.forward = LogprobForward(
            Scorer(self.net), self.read, temperature=0.7, bans=True, device=CPU, cache_bytes=cache_bytes, **options
        )

    def _count(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append(len(kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]))

    def logprobs(self, packs: Sequence[Pack], **options: bool) -> list[Floats]:
        by_id = dict(self.forward.logprobs(packs, **options))
        return [by_id[i] for i in sorted(by_id)]

    def gradients(self, pack: Pack) -> dict[str, torch.Tensor]:
        self.net.zero_grad()
        out = self.forward(pack)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        return {name: p.grad.clone() for name, p in self.net.named_parameters() if p.grad is not None}


def counts(passes: LogprobForward) -> tuple[float, ...]:
    """Images that went through the tower, and cache hits, since the last call."""
    metrics = passes.take_counts()
    assert list(metrics) == ["vision/tower_calls", "vision/cache_hits"]
    return tuple(count.value for count in metrics.values() if isinstance(count, Sum))


def assert_equal(ours: Sequence[Floats], theirs: Sequence[Floats], tolerance: float = 5e-6) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=tolerance)


# ---------------------------------------------------------------- images are cached


@pytest.mark.parametrize("family", FAMILIES)
def test_images_go_through_a_frozen_tower_once_per_run(made: Any, family: tiny.Family) -> None:
    fresh, kept = WatchedForward(made(family), cache_bytes=0), WatchedForward(made(family))
    samples = batch(kept.read)
    expected = fresh.logprobs(packs(samples))
    assert fresh.calls == [3]
    # One pack, then many: in every layout, with and without gradients. Three images, and never again.
    assert_equal(kept.logprobs(packs(samples)), expected)
    assert counts(kept.forward) == (3, 0)
    for layout in ("shared", "packed", "padded"):
        cuts = packs(samples, layout, max_tokens=30)  # type: ignore[arg-type]
        assert len(cuts) > 2
        assert_equal(kept.logprobs(cuts), expected, 1e-5)
        assert counts(kept.forward) == (0, sum(len(pack.media) for pack in cuts))
    assert_equal(kept.logprobs(packs(samples), gradient=True), expected)
    assert kept.calls == [3]
    # New images, of other prompts, beside cached ones.
    others = [replace(sample, group=sample.group + len(samples)) for sample in batch(kept.read, seed=1)]
    kept.logprobs(packs([*samples, *others]))
    assert kept.calls == [3, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_without_a_cache(made: Any, family: tiny.Family) -> None:
    fresh, kept = WatchedForward(made(family), cache_bytes=0), WatchedForward(made(family))
    (pack,) = packs(batch(kept.read))
    expected = fresh.gradients(pack)
    assert expected
    assert not any("visual" in name for name in expected)
    for _ in range(2):
        gradients = kept.gradients(pack)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            scale = float(expected[name].abs().max().clamp(min=1.0))
            torch.testing.assert_close(gradient, expected[name], atol=1e-6 * scale, rtol=1e-5)
    assert kept.calls == [3]


def test_every_level_of_the_tower_is_cached(made: Any) -> None:
    kept = WatchedForward(made("qwen3_vl"))
    kept.logprobs(packs(batch(kept.read)))
    held = kept.forward._cache._features  # type: ignore[union-attr]
    assert [len(features.deepstack) for features in held.values()] == [1, 1, 1]
    # The log-probs depend on them.
    expected = kept.logprobs(packs(batch(kept.read)))
    for name, features in list(held.items()):
        held[name] = features._replace(deepstack=tuple(torch.zeros_like(level) for level in features.deepstack))
    assert np.abs(kept.logprobs(packs(batch(kept.read)))[0] - expected[0]).max() > 1e-3


def test_a_cache_that_holds_one_image_at_a_time_changes_nothing(made: Any) -> None:
    fresh = WatchedForward(made("qwen2_5_vl"), cache_bytes=0)
    # The largest image has six tokens of 64 numbers.
    small = WatchedForward(made("qwen2_5_vl"), cache_bytes=6 * 64 * 4)
    samples = batch(small.read)
    for _ in range(2):
        assert_equal(small.logprobs(packs(samples)), fresh.logprobs(packs(samples)))
        assert small.forward._cache.num_bytes <= 6 * 64 * 4  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"vision\.cache_gib .* cannot hold a single image"):
        WatchedForward(made("qwen2_5_vl"), cache_bytes=6 * 64 * 4 - 1).logprobs(packs(samples))


# ---------------------------------------------------------------- and only while they are valid


def test_zero_bytes_cache_nothing(made: Any) -> None:
    passes = WatchedForward(made("qwen2_5_vl"), cache_bytes=0)
    for _ in range(2):
        passes.logprobs(packs(batch(passes.read)))
        assert counts(passes.forward) == (3, 0)
    assert passes.calls == [3, 3]


@pytest.mark.parametrize("part", ["visual.blocks", "visual.merger"])
def test_nothing_is_cached_while_tower_or_projector_trains(made: Any, part: str) -> None:
    net, read = made("qwen2_5_vl")
    net.base_model.visual.requires_grad_(False)
    for name, parameter in net.named_parameters():
        if part in name:
            parameter.requires_grad_(True)
    passes = LogprobForward(Scorer(net), read, temperature=1.0, bans=True, device=CPU, cache_bytes=GIB)
    for _ in range(2):
        passes.logprobs(packs(batch(read)))
    assert counts(passes) == (6, 0)


def adapted(made: Any, targets: tuple[str, ...]) -> tuple[PreTrainedModel, Processor]:
    net, read = made("qwen2_5_vl")
    selected = choose_targets(targets, layers(net, read), frozen=())
    inject_adapter(net, AdapterPlan(2, 16.0, 0.5, False, False, tuple(selected), frozenset(selected.values())))
    torch.manual_seed(2)
    with torch.no_grad():
        for _, parameter in adapter_tensors(net):
            parameter.normal_(std=0.1)
    return net, read


def test_nothing_is_cached_with_an_adapter_of_the_tower(made: Any) -> None:
    net, read = adapted(made, ("vision",))
    passes = LogprobForward(Scorer(net), read, temperature=1.0, bans=True, device=CPU, cache_bytes=GIB)
    on = dict(passes.logprobs(packs(batch(read))))
    with adapters_off(net):
        off = dict(passes.logprobs(packs(batch(read))))
    assert counts(passes) == (6, 0)
    sees = [bool(sample.media) for sample in batch(read)]
    gaps = [float(np.abs(on[i] - off[i]).max()) for i in range(len(sees))]
    assert all(gap > 1e-3 if has_image else gap == 0 for gap, has_image in zip(gaps, sees, strict=True)), gaps


def test_with_an_adapter_of_the_language_model_images_are_cached_with_it_on_and_off(made: Any) -> None:
    net, read = adapted(made, ("all-linear",))
    passes, fresh = (
        LogprobForward(Scorer(net), read, temperature=1.0, bans=True, device=CPU, cache_bytes=size) for size in (GIB, 0)
    )
    expected = [row for _, row in fresh.logprobs(packs(batch(read)))]
    assert_equal([row for _, row in passes.logprobs(packs(batch(read)))], expected)
    assert counts(passes) == (3, 0)
    with adapters_off(net):
        off = [row for _, row in fresh.logprobs(packs(batch(read)))]
        assert_equal([row for _, row in passes.logprobs(packs(batch(read)))], off)
    # Dropout is off in passes with a gradient, and features come from the cache.
    rows = passes.logprobs(packs(batch(read)), gradient=True)
    assert_equal([row for _, row in rows], expected)
    assert counts(passes) == (0, 6)
    assert np.abs(expected[0] - off[0]).max() > 1e-3


def test_unfreezing_a_tower_with_a_cache_is_refused(made: Any) -> None:
    passes = WatchedForward(made("qwen2_5_vl"))
    passes.logprobs(packs(batch(passes.read)))
    freeze(passes.net, passes.read, vision=True, projector=False)
    with pytest.raises(VlmrlError, match="cached while the vision tower or projector trains"):
        passes.logprobs(packs(batch(passes.read)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_old_weights_changes_images_until_it_is_cleared(made: Any, family: tiny.Family) -> None:
    passes = WatchedForward(made(family))
    before = passes.logprobs(packs(batch(passes.read)))
    with torch.no_grad():
        for parameter in passes.net.base_model.visual.parameters():  # type: ignore[union-attr]
            parameter.mul_(1.1)
    stale = passes.logprobs(packs(batch(passes.read)))
    assert_equal(stale, before)
    passes.forward.clear_cache()
    assert passes.forward._cache.num_bytes == 0  # type: ignore[union-attr]
    fresh = passes.logprobs(packs(batch(passes.read)))
    gaps = [float(np.abs(mine - other).max()) for mine, other in zip(stale, fresh, strict=True)]
    sees = [bool(sample.media) for sample in batch(passes.read)]
    assert all(gap > 1e-3 if has_image else gap < 1e-6 for gap, has_image in zip(gaps, sees, strict=True)), gaps


def test_text_models_have_nothing_to_cache(made: Any) -> None:
    net, read = made("qwen3")
    passes = LogprobForward(Scorer(net), read, temperature=1.0, bans=True, device=CPU, cache_bytes=GIB)
    rows = passes.logprobs([make_pack([Sample(np.arange(5) + 65, np.arange(5) > 1)], [0], "shared")])
    assert [(i, len(row)) for i, row in rows] == [(0, 5)]
    assert counts(passes) == (0, 0)


# ---------------------------------------------------------------- two models with one cache


def valued(made: Any, family: tiny.Family, seed: int = 0) -> tuple[PreTrainedModel, Processor]:
    """The same model with a value head."""
    source, read = made(family)
    net: Any = source
    net.score = torch.nn.Linear(net.config.get_text_config().hidden_size, 1, bias=False)
    torch.manual_seed(seed)
    torch.nn.init.normal_(net.score.weight)
    return net, read


def policy_and_critic(made: Any, family: tiny.Family = "qwen2_5_vl") -> tuple[WatchedForward, ValueForward, list[int]]:
    """Log-probs of a policy, values of a critic, and the calls of the critic's tower."""
    policy = WatchedForward(made(family))
    net, read = valued(made, family)
    freeze(net, read, vision=True, projector=True)
    calls: list[int] = []
    tower: Any = net.base_model.visual
    tower.register_forward_pre_hook(lambda *_: calls.append(1), with_kwargs=True)
    return policy, ValueForward(ValueModel(net), read, device=CPU, cache_bytes=GIB), calls


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_share_a_cache_encode_each_image_once(made: Any, family: tiny.Family) -> None:
    policy, critic, calls = policy_and_critic(made, family)
    expected = critic.values(packs(batch(policy.read)))
    assert len(calls) == 1
    assert not critic.shares_features(policy.forward)
    policy.forward.share_cache(critic)
    assert critic.shares_features(policy.forward)
    assert policy.forward.shares_features(critic)
    calls.clear()
    policy.logprobs(packs(batch(policy.read)))
    rows = critic.values(packs(batch(policy.read)))
    assert (policy.calls, calls) == ([3], [])
    assert_equal([row for _, row in rows], [row for _, row in expected])


def test_clearing_a_shared_cache_clears_it_for_both_and_separate_caches_are_separate(made: Any) -> None:
    policy, critic, calls = policy_and_critic(made)
    policy.forward.share_cache(critic)
    policy.logprobs(packs(batch(policy.read)))
    critic.clear_cache()
    critic.values(packs(batch(policy.read)))
    assert (policy.calls, calls) == ([3], [1])
    policy.forward.start_cache()
    critic.start_cache()
    assert not critic.shares_features(policy.forward)
    policy.logprobs(packs(batch(policy.read)))
    critic.values(packs(batch(policy.read)))
    assert (policy.calls, calls) == ([3, 3], [1, 1])


def test_sharing_a_cache_between_different_towers_gives_wrong_values(made: Any) -> None:
    policy, critic, calls = policy_and_critic(made)
    with torch.no_grad():
        for parameter in critic.tower.values():
            parameter.mul_(1.1)
    expected = dict(critic.values(packs(batch(policy.read))))
    policy.forward.share_cache(critic)
    policy.logprobs(packs(batch(policy.read)))
    wrong = dict(critic.values(packs(batch(policy.read))))
    for i, sample in enumerate(batch(policy.read)):
        gap = np.abs(wrong[i] - expected[i]).max()
        assert gap > 1e-3 if sample.media else gap < 1e-5
    assert len(calls) == 1


@pytest.mark.parametrize("who", ["policy", "critic"])
def test_unfreezing_either_tower_is_refused_by_both_models(made: Any, who: str) -> None:
    policy, critic, _ = policy_and_critic(made)
    policy.forward.share_cache(critic)
    tower = policy.forward.tower if who == "policy" else critic.tower
    next(iter(tower.values())).requires_grad_(True)
    with pytest.raises(VlmrlError, match="cached while the vision tower or projector trains"):
        policy.logprobs(packs(batch(policy.read)))
    with pytest.raises(VlmrlError, match="cached while the vision tower or projector trains"):
        critic.values(packs(batch(policy.read)))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_a_value_comes_from_the_state_before_a_sampled_token(made: Any, layout: Layout) -> None:
    net, read = valued(made, "qwen3")
    passes = ValueForward(ValueModel(net), read, device=CPU, cache_bytes=0)
    prompt = np.array([65, 66, 67])
    # The fifth token of the second response was not sampled.
    flags = [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 1]]
    samples = [
        Sample(np.concatenate([prompt, np.arange(70, 70 + len(row) - 3)]), np.array(row, bool), (), 0) for row in flags
    ]
    by_id = dict(passes.values([make_pack(samples, [7, 4], layout)]))
    assert sorted(by_id) == [4, 7]
    for i, sample in ((7, samples[0]), (4, samples[1])):
        states: Any = net.base_model(torch.from_numpy(sample.tokens)[None], use_cache=False).last_hidden_state[0]
        expected = np.zeros(len(sample.tokens), np.float32)
        expected[1:] = (states[:-1] @ net.score.weight[0]).detach().numpy()  # type: ignore[union-attr, index, operator]
        np.testing.assert_allclose(by_id[i], np.where(sample.sampled, expected, 0.0), atol=2e-5)
        assert np.abs(by_id[i][sample.sampled]).min() > 1e-3


# ---------------------------------------------------------------- ranks in lockstep


@pytest.mark.parametrize(("others", "calls"), [(0, []), (1, [1])])
def test_a_rank_with_all_images_cached_runs_the_tower_if_another_must(
    made: Any, monkeypatch: pytest.MonkeyPatch, others: int, calls: list[int]
) -> None:
    num_new = []

    def reduce(tensor: torch.Tensor, op: Any) -> None:
        num_new.append(int(tensor))
        tensor.clamp_(min=others)

    monkeypatch.setattr(module.torch.distributed, "all_reduce", reduce)
    passes = WatchedForward(made("qwen2_5_vl"), ranks_in_lockstep=True)
    (pack,) = packs(batch(passes.read))
    expected = passes.logprobs([pack])
    assert passes.calls == [3]
    passes.calls.clear()
    assert_equal(passes.logprobs([pack]), expected)
    # The smallest of the three.
    assert passes.calls == calls
    assert num_new == [3, 0]
    assert counts(passes.forward) == (3 + len(calls), 3 - len(calls))


# ---------------------------------------------------------------- outputs per sample


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_fillers_have_no_outputs_and_change_nothing(made: Any, layout: Layout) -> None:
    passes = WatchedForward(made("qwen2_5_vl"), frozen=False)
    samples = batch(passes.read)[2:4]
    blank = passes.read.dummy_sample()
    assert blank is not None
    alone = passes.forward.logprobs([make_pack(samples, [7, 4], layout)])
    filled = passes.forward.logprobs([make_pack([*samples, blank], [7, 4, FILLER], layout)])
    assert [i for i, _ in filled] == [i for i, _ in alone] == [7, 4]
    assert_equal([row for _, row in filled], [row for _, row in alone], 1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_a_trainable_tower_runs_in_every_pass_with_a_gradient(made: Any, layout: Layout) -> None:
    passes = WatchedForward(made("qwen2_5_vl"), frozen=False)
    text = make_pack(batch(passes.read)[2:4], [0, 1], layout)
    without = passes.logprobs([text])
    assert passes.calls == []
    gradients = passes.gradients(text)
    assert passes.calls == [1]
    assert passes.forward(text).logprobs.shape == text.shape
    assert all(not gradients[name].any() for name in gradients if "visual" in name)
    assert any("visual" in name for name in gradients)
    assert_equal(passes.logprobs([text], gradient=True), without, 1e-5)


def test_a_pass_with_a_gradient_changes_nothing(made: Any) -> None:
    passes = WatchedForward(made("qwen2_5_vl"), frozen=False)
    passes.net.train()
    cuts = packs(batch(passes.read), max_tokens=30)
    assert_equal(passes.logprobs(cuts, gradient=True), passes.logprobs(cuts), 1e-6)
    assert all(parameter.grad is None for parameter in passes.net.parameters())
    assert passes.net.training
    assert torch.is_grad_enabled()
