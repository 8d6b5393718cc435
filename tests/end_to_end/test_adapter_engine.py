"""Adapters in real vLLM on CPU: the engine applies the adapter that it reports, and reports faults."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_pair import EXACT, SAMPLING, Pair, Trainer, rollout_engine, sync
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from vlmrl.errors import SyncError
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan, adapter_fingerprint
from vlmrl.models.weight_buckets import digest, pack_bucket
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.types import Group

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PLANS = {
    # A rank that vLLM does not offer, and a scaling that is not a power of two.
    "qwen3": {"suffixes": ALL, "rank": 3, "alpha": 10.0, "is_rank_stabilized": False},
    # Some of the matrices that vLLM packs into one layer have an adapter, and some have none.
    "qwen3_vl": {"suffixes": ("q_proj", "v_proj", "up_proj"), "rank": 8, "alpha": 16.0, "is_rank_stabilized": False},
    # The last is the one that the other tests use.
    "qwen2_5_vl": {"suffixes": ALL, "rank": 4, "alpha": 16.0, "is_rank_stabilized": True},
}

OTHERS = {
    "internvl": {"suffixes": ALL, "rank": 4, "alpha": 16.0, "is_rank_stabilized": False},
    "smolvlm": {"suffixes": ALL, "rank": 4, "alpha": 16.0, "is_rank_stabilized": False},
    # Gate and up are one matrix, which vLLM takes no adapter of.
    "glm4v": {"suffixes": (*ALL[:4], "down_proj"), "rank": 4, "alpha": 16.0, "is_rank_stabilized": False},
}
"""Families whose proofs take longer than `make test` may."""


class Adapted(Trainer):
    """A trainer with an adapter on its language model."""

    def __init__(self, model: Path, *, suffixes: Sequence[str], **shape: Any) -> None:
        super().__init__(model)
        self.plan = AdapterPlan(
            **shape,
            dropout=0.0,
            has_magnitude=False,
            targets=tuple(
                name
                for name, _ in self.net.named_modules()
                if name.endswith(tuple(suffixes)) and self.tools.parameter_group(name) == "language"
            ),
            groups=frozenset({"language"}),
        )
        config = LoraConfig(
            r=self.plan.rank,
            lora_alpha=self.plan.alpha,  # type: ignore[arg-type]
            use_rslora=self.plan.is_rank_stabilized,
            target_modules="|".join(name.replace(".", r"\.") for name in self.plan.targets),
        )
        inject_adapter_in_model(config, self.net)
        self.switch(on=True)

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the base weights under their names without the adapter."""
        return [(n.replace(".base_layer", ""), w) for n, w in self.net.named_parameters() if "lora_" not in n]

    def adapter(self) -> list[tuple[str, Tensor]]:
        named = dict(self.net.named_parameters())
        return [(n, named[_in_memory(n)].detach()) for n in self.plan.tensor_names]

    def fingerprint(self) -> str:
        return adapter_fingerprint({name: digest(name, t) for name, t in self.adapter()}, self.plan.scaling)

    @torch.no_grad()
    def train(self) -> None:
        """Change the adapter's weights at random."""
        for name, tensor in self.adapter():
            if "lora_B" in name:
                tensor.normal_(std=0.05)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.01)

    def switch(self, *, on: bool) -> None:
        for module in self.net.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(on)


def _in_memory(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".weight", ".default.weight")


@dataclasses.dataclass
class AdaptedPair(Pair):
    trainer: Adapted

    def send(self, *, version: int | None = None) -> str:
        """Sync the adapter, in two buckets."""
        return self.run(send(self.engine, self.trainer, version or self.engine.version + 1))

    def plant(self, fault: str) -> None:
        self.run(self.engine._call("vlmrl_plant", fault))

    def sample(self, *, adapter: bool) -> list[Group]:
        async def ask() -> list[Group]:
            prompts = self.trainer.prompts()
            return await asyncio.gather(*(self.engine.generate(p, SAMPLING, adapter=adapter) for p in prompts))

        return self.run(ask())

    def gap(self, *, adapter: bool, groups: Sequence[Group] | None = None) -> float:
        """Return the largest gap between log-probs of engine and trainer, both with or both without the adapter."""
        groups = self.sample(adapter=adapter) if groups is None else groups
        self.trainer.switch(on=adapter)
        try:
            return self.trainer.difference(groups)
        finally:
            self.trainer.switch(on=True)


async def send(engine: RolloutEngine, trainer: Adapted, version: int) -> str:
    tensors = trainer.adapter()
    await engine.begin_update(version, adapter=True)
    for half in (tensors[:5], tensors[5:]):
        await engine.load_bucket(pack_bucket(half))
    return await engine.finish_update(vision_changed=False)


class FaultyEngine(RolloutEngine):
    """An engine whose workers can be made faulty."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"worker_extension_cls": "adapter_faults.Faulty"}


class AdaptedEngines:
    """At most one running engine: starting another stops the previous one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pairs: dict[str, AdaptedPair] = {}

    def pair(self, family: Any) -> AdaptedPair:
        if family not in self._pairs:
            self.stop()
            torch.manual_seed(0)
            model = tiny.build(family, self._root / family, size="micro")
            trainer = Adapted(model, **(PLANS | OTHERS)[family])
            engine = rollout_engine(model, kind=FaultyEngine, adapter=trainer.plan)
            pair = self._pairs[family] = AdaptedPair(engine, trainer, asyncio.Runner())
            pair.run(pair.engine.start())
        return self._pairs[family]

    def stop(self) -> None:
        while self._pairs:
            _, pair = self._pairs.popitem()
            pair.run(pair.engine.shutdown())
            pair.runner.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdaptedEngines]:
    engines = AdaptedEngines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.stop()


@pytest.fixture
def pair(engines: AdaptedEngines) -> AdaptedPair:
    """An engine with its trainer's adapter."""
    pair = engines.pair("qwen2_5_vl")
    pair.plant("AdapterUpdate")
    pair.trainer.train()
    pair.send()
    return pair


# ---------------------------------------------------------------- the same function on both sides


@pytest.mark.parametrize("family", [*(pytest.param(name, marks=pytest.mark.prove) for name in OTHERS), *PLANS])
def test_engine_and_trainer_agree_with_the_adapter_and_without_it(engines: AdaptedEngines, family: str) -> None:
    pair = engines.pair(family)
    with pytest.raises(SyncError, match=r"engine-0 has no adapter on its base of version 0: sync one first"):
        pair.sample(adapter=True)
    assert pair.gap(adapter=False) < EXACT
    assert pair.run(pair.engine.status())["adapter"] is None
    assert pair.send() == pair.trainer.fingerprint()  # B is zero
    assert pair.gap(adapter=True) < EXACT
    for version in (2, 3):
        pair.trainer.train()
        assert pair.gap(adapter=True) > 1e-3, "a change must show before it is synced"
        assert pair.send() == pair.trainer.fingerprint()
        groups = pair.sample(adapter=True)
        assert pair.gap(adapter=True, groups=groups) < EXACT
        assert pair.gap(adapter=False, groups=groups) > 1e-3
        assert {v for group in groups for rollout in group.rollouts for v in rollout.versions} == {version}
        assert pair.gap(adapter=False) < EXACT
    status = pair.run(pair.engine.status())
    assert status["adapter"] == {"version": 3, "fingerprint": pair.trainer.fingerprint()}
    assert status["version"] == 3


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_a_new_base_waits_for_its_adapter(engines: AdaptedEngines, family: str) -> None:
    pair = engines.pair(family)
    pair.trainer.change("everything")
    pair.sync()
    with pytest.raises(SyncError, match=rf"no adapter on its base of version {pair.engine.version}"):
        pair.sample(adapter=True)
    assert pair.gap(adapter=False) < EXACT
    pair.send()
    assert pair.gap(adapter=True) < EXACT
    assert pair.gap(adapter=False) < EXACT


def test_requests_with_and_without_the_adapter_share_a_batch(pair: AdaptedPair) -> None:
    async def both() -> list[Group]:
        prompts = [pair.trainer.prompt(i, "how many dots?", images=i % 2) for i in range(6)]
        requests = (pair.engine.generate(p, SAMPLING, adapter=bool(i % 3)) for i, p in enumerate(prompts))
        return await asyncio.gather(*requests)

    groups = pair.run(both())
    assert pair.gap(adapter=True, groups=[g for i, g in enumerate(groups) if i % 3]) < EXACT
    assert pair.gap(adapter=False, groups=[g for i, g in enumerate(groups) if not i % 3]) < EXACT


def test_scores_are_those_of_the_base_or_of_base_and_adapter(pair: AdaptedPair) -> None:
    groups = pair.sample(adapter=True)

    async def score() -> list[Any]:
        requests = [(group, adapter) for group in groups for adapter in (True, False)]
        return await asyncio.gather(*(pair.engine.score(group, adapter=adapter) for group, adapter in requests))

    scores = pair.run(score())
    for group, rows, base in zip(groups, scores[::2], scores[1::2], strict=True):
        for segment, row, other in zip(group.segments, rows, base, strict=True):
            for logprobs, on in ((row, True), (other, False)):
                pair.trainer.switch(on=on)
                wanted = pair.trainer.plain_logprobs(segment)
                pair.trainer.switch(on=True)
                assert np.abs(logprobs - wanted).max() < EXACT


def test_a_request_in_flight_goes_on_with_the_new_adapter(pair: AdaptedPair) -> None:
    before = pair.engine.version
    long = dataclasses.replace(SAMPLING, max_new_tokens=400)
    prompts = [pair.trainer.prompt(80 + i, "go on") for i in range(4)]

    async def both() -> list[Group]:
        asking = [asyncio.ensure_future(pair.engine.generate(prompt, long)) for prompt in prompts]
        await until_running(pair.engine, len(prompts))
        await send(pair.engine, pair.trainer, before + 1)
        return await asyncio.gather(*asking)

    pair.trainer.train()
    mixed = pair.run(pair.engine.status())["num_mixed_groups"]
    groups = pair.run(both())
    assert before in {v for group in groups for r in group.rollouts for v in r.versions}
    assert pair.run(pair.engine.status())["num_mixed_groups"] > mixed
    assert pair.gap(adapter=True) < EXACT


def test_a_new_base_ends_requests_for_the_adapter_and_no_others(pair: AdaptedPair) -> None:
    long = dataclasses.replace(SAMPLING, max_new_tokens=400)
    prompts = [pair.trainer.prompt(80 + i, "go on") for i in range(4)]

    async def both() -> list[Any]:
        requests = [pair.engine.generate(p, long, adapter=bool(i % 2)) for i, p in enumerate(prompts)]
        asking = [asyncio.ensure_future(one) for one in requests]
        await until_running(pair.engine, len(prompts))
        await sync(pair.engine, pair.trainer.weights(), pair.engine.version + 1)
        return await asyncio.gather(*asking, return_exceptions=True)

    results = pair.run(both())
    assert [isinstance(result, Group) for result in results] == [True, False, True, False]
    assert ["has no adapter on its base" in str(result) for result in results[1::2]] == [True, True], results[1::2]
    pair.send()
    assert pair.gap(adapter=True) < EXACT


async def until_running(engine: RolloutEngine, count: int) -> None:
    while (await engine.status())["num_running"] < count:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)


# ---------------------------------------------------------------- planted faults

FAULTS = [
    ("Ignores", r"vLLM did not activate the adapter"),
    ("Forgets", r"vLLM's layers hold nothing of .*layers\.0\.mlp\.down_proj\.lora_A\.weight.* and \d+ more"),
    ("Keeps", r"vLLM's layers hold still the older .*lora_A\.weight.* and \d+ more"),
    ("TakesOtherNames", r"vLLM's model has no place for base_model\.model\.model\.language_model\.layers\.0.* more"),
    ("SwapsLayers", r"vLLM's layers hold something else than was sent for .*layers\.0"),
    ("LosesOne", r"vLLM's layers hold nothing of \S+layers\.1\.self_attn\.k_proj\.lora_A\.weight$"),
    ("LosesOneOnTheWay", r"no weights arrived for \S+layers\.1\.mlp\.down_proj\.lora_B\.weight$"),
    ("AppliesTwice", r"vLLM's layers apply the adapter 2 times: by 16 instead of 8"),
    ("ScalesWrongly", r"vLLM's layers apply the adapter wrongly scaled: by 4 instead of 8"),
    (
        "ChangesOneNumber",
        r"vLLM's layers hold something else than was sent for \S+layers\.0\.self_attn\.v_proj\.lora_B\.weight$",
    ),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_an_adapter_that_the_layers_do_not_hold_is_refused_until_one_is_right(
    pair: AdaptedPair, fault: str, message: str
) -> None:
    before = pair.engine.version
    pair.plant(fault)
    pair.trainer.train()
    with pytest.raises(SyncError, match=rf"version {before + 1} to rollout engine engine-0 failed: {message}"):
        pair.send()
    for adapter in (True, False):
        with pytest.raises(SyncError, match="engine-0 failed"):
            pair.sample(adapter=adapter)
    status = pair.run(pair.engine.status())
    assert (status["version"], status["adapter"]) == (before, None)
    pair.plant("AdapterUpdate")
    assert pair.send() == pair.trainer.fingerprint()
    assert pair.gap(adapter=True) < EXACT


def test_a_tensor_of_another_adapter_is_refused(pair: AdaptedPair) -> None:
    async def surplus() -> None:
        await pair.engine.begin_update(pair.engine.version + 1, adapter=True)
        name = "base_model.model.model.language_model.layers.9.mlp.up_proj.lora_A.weight"
        await pair.engine.load_bucket(pack_bucket([*pair.trainer.adapter(), (name, torch.zeros(4, 64))]))
        await pair.engine.finish_update(vision_changed=False)

    with pytest.raises(SyncError, match=r"its adapter has no \S+layers\.9\.mlp\.up_proj\.lora_A\.weight"):
        pair.run(surplus())


def test_an_adapter_is_not_put_on_half_a_base(pair: AdaptedPair) -> None:
    with pytest.raises(SyncError, match="no weights arrived for"):
        pair.sync(skip="layers.1.self_attn.k_proj.weight")
    with pytest.raises(SyncError, match=r"was sent an adapter but has no complete base: .*sync the base"):
        pair.send()
    pair.sync()
    pair.send()
    assert pair.gap(adapter=True) < EXACT


def test_an_update_that_never_ended_leaves_the_adapter_to_the_next(pair: AdaptedPair) -> None:
    async def broken_off(*, adapter: bool) -> None:
        await pair.engine.begin_update(99, adapter=adapter)
        tensors = pair.trainer.adapter() if adapter else pair.trainer.weights()
        await pair.engine.load_bucket(pack_bucket(tensors[:5]))

    pair.run(broken_off(adapter=True))
    pair.send()
    assert pair.gap(adapter=True) < EXACT
    pair.run(broken_off(adapter=True))
    pair.sync()
    pair.send()
    assert pair.gap(adapter=True) < EXACT


def test_prefixes_of_an_older_adapter_are_not_found_even_when_they_are_not_thrown_away(
    pair: AdaptedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: the engine keeps its prefix cache; then it also gives all adapters the same name."""

    async def forget() -> None:
        """Keep the cache."""

    prompt = pair.trainer.prompt(3, "long " * 60)

    def gap() -> float:
        return pair.gap(adapter=True, groups=pair.generate([prompt]))

    monkeypatch.setattr(pair.engine, "_reset_prefix_cache", forget)
    assert gap() < EXACT
    pair.trainer.train()
    pair.send()
    assert gap() < EXACT
    always = pair.engine._lora_request()
    monkeypatch.setattr(pair.engine, "_lora_request", lambda: always)
    pair.trainer.train()
    pair.send()
    assert gap() > 1e-3, "only the probe after a weight sync can see this"
    monkeypatch.undo()
    pair.send()
    assert gap() < EXACT
