"""Order of release, wake and sleep on GPUs that trainer and engines share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlmrl.cluster import engines as engines_module
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.models import PackingPlan, PassMetrics, Ranks, RemotePolicy, StepPlan
from vlmrl.cluster.remote_call import record_call
from vlmrl.cluster.sync_plan import SyncPlan
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.config.vllm import Vllm
from vlmrl.data.experience import Experience
from vlmrl.types import Prompt, Sample, Sampling

SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=1, seed=0)
PROMPT = Prompt(0, "row 0", "?", tokens=np.arange(2), request=np.arange(2), label=None)
RESULTS = {
    "begin_sync": 1,
    "share": "ticket",
    "finish_sync": ("abc", 8),
    "finish_update": "abc",
    "update": [{}],
    "generate": "group",
    "respond": "group",
}


class Workers:
    """A group of one worker that records its calls."""

    nodes = (0,)

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __len__(self) -> int:
        return 1

    def call(self, function: Any, *item: Any) -> list[Any]:
        method, args, _ = record_call(function, *item)
        tags = f" {' '.join(args[0])}" if method == "wake" else ""
        self.log.append(f"{self.name} {method}{tags}")
        return [RESULTS.get(method)]

    submit = call

    def submit_to(self, worker: int, function: Any) -> Any:
        return self.call(function)[0]

    def each(self, function: Any, items: list[Any]) -> list[Any]:
        return [self.call(function, item)[0] for item in items]

    submit_each = each

    def wait(self, results: Any, timeout_s: float | None = None, **_: Any) -> Any:
        return results


def start(*colocated: str, sleeps: bool) -> tuple[RemoteEngines, RemotePolicy, WeightSync, list[str]]:
    log: list[str] = []
    groups = {name: Workers(name, log) for name in ("actor", *colocated)}
    engines = RemoteEngines(
        Workers("engines", log),  # type: ignore[arg-type]
        timeout_s=1.0,
        sleeps=sleeps,
        colocated=lambda: list(groups.values()),  # type: ignore[arg-type]
    )
    packing = PackingPlan("padded", 100, max_samples=None, image_cost=lambda image: 1.0, filler=None)
    policy = RemotePolicy(
        Ranks(groups["actor"], packing, 100, PassMetrics()),  # type: ignore[arg-type]
        StepPlan(batch_size=1, epochs=1, seed=0),
    )
    plan = SyncPlan("whole", base_goes_first=False, vision_changes=False, vllm=Vllm(readback_steps=-1))
    return engines, policy, WeightSync(groups["actor"], engines, plan), log  # type: ignore[arg-type]


def step(
    engines: RemoteEngines, policy: RemotePolicy, weight_sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do what the loop does from an update to the next responses."""
    samples = [Sample(tokens=np.arange(2), sampled=np.array([False, True]), group=0)]
    column = [np.zeros(2, dtype=np.float32)]
    policy.update(Experience(samples, column, column, column), step=1)
    weight_sync.sync(1)
    with monkeypatch.context() as patched:
        patched.setattr(engines_module, "ray", SimpleNamespace(wait=lambda refs, **kwargs: (refs[:1], [])))
        engines.generate([PROMPT], SAMPLING)


SYNC = [
    *("actor begin_sync", "actor share", "engines begin_update", "engines load"),
    *("actor finish_sync", "engines finish_update"),
]


def test_memory_is_released_before_the_weights_wake_and_again_before_the_cache_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, policy, weight_sync, log = start("critic", "ref", "reward_model", sleeps=True)
    # Other roles load their models into the memory that the engines measured as free.
    assert log == ["engines start", "engines sleep"]
    log.clear()
    step(engines, policy, weight_sync, monkeypatch)
    release = [f"{name} release" for name in ("actor", "critic", "ref", "reward_model")]
    assert log == [
        "actor update",
        *(*release, "engines wake weights", *SYNC),
        *(*release, "engines wake weights kv_cache", "engines respond", "engines sleep"),
    ]


def test_memory_that_is_awake_is_not_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, _, weight_sync, log = start(sleeps=True)
    log.clear()
    weight_sync.sync(0)
    weight_sync.sync(1)
    assert log == ["actor release", "engines wake weights", *SYNC, *SYNC]
    log.clear()
    engines.respond_each(PROMPT, SAMPLING)
    engines.respond_each(PROMPT, SAMPLING)
    awake = ["actor release", "engines wake weights kv_cache", "engines generate", "engines sleep"]
    assert log == awake * 2


def test_engines_that_never_sleep_need_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, policy, weight_sync, log = start("ref", sleeps=False)
    step(engines, policy, weight_sync, monkeypatch)
    assert log == ["engines start", "actor update", *SYNC, "engines respond"]
