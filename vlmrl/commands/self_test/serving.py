"""Check an engine and a policy as a run has them: equal log-probs, weight sync by every backend, sleep, adapters.

They use the code of a run: roles are actors in a Ray session, and weights are synced as in a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.placement import plan
from vlmrl.cluster.roles import plan_arguments
from vlmrl.cluster.session import session
from vlmrl.cluster.sync_plan import plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.commands.preflight import actor_adapter_plan
from vlmrl.commands.rl_checks import adapter_check
from vlmrl.commands.self_test import models
from vlmrl.commands.self_test.changeable_policy import ChangeablePolicy
from vlmrl.commands.self_test.outcome import Broken, Skipped
from vlmrl.config.verbs import RlConfig
from vlmrl.data.media import InlineMedia
from vlmrl.data.responses import to_samples
from vlmrl.learning.settings import PolicySettings
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.parallel import run_parallel
from vlmrl.plugins import Processor, processor_of
from vlmrl.system.machine import GIB
from vlmrl.types import Floats, Group, Prompt, Sampling
from vlmrl.verify.adapters import AdapterCheck
from vlmrl.verify.logprobs import largest_gap

_FACTOR = 1.5
_NUM_SYNCS = {"cuda": 20, "cpu": 6}
"""Weight syncs that must pass the adapter check. On CPU, in fp32, fewer are enough."""
_FREED_SHARE = 0.9
"""Share of its memory pool that an engine must free while it sleeps."""
_OUTSIDE_POOL = GIB
"""Bytes of GPU memory that an engine always keeps: CUDA itself, kernels, captured graphs."""


class _Builder(RoleBuilder):
    """Builds a `ChangeablePolicy` in place of a run's `Policy`."""

    def policy(self, settings: PolicySettings) -> WorkerGroup[ChangeablePolicy]:
        build = partial(ChangeablePolicy, settings)
        return self.group("actor", build, timeout_s=settings.loop.timeout_s, distributed=True)


class _SilentProgress:
    """Ignores all progress messages."""

    def say(self, what: str) -> None:
        """Ignore the line."""

    def generated(self, done: int, total: int) -> None:
        """Ignore the count."""


@dataclass
class Pair:
    """An engine and a policy of the same model, with an adapter."""

    config: RlConfig
    processor: Processor
    engines: RemoteEngines
    policy: RemotePolicy
    policy_group: WorkerGroup[ChangeablePolicy]
    memory_sync: WeightSync
    """Through the memory that processes share."""
    device_sync: WeightSync | None
    """From GPU to GPU; None without one."""
    adapters: AdapterCheck
    version: int = 0

    @property
    def bound(self) -> float:
        """The largest mean difference of log-probs that a run in this data type allows."""
        return largest_gap(self.config)

    def prompts(self) -> list[Prompt]:
        """Three prompts, with one, no and two images."""
        return [_prompt(self.processor, self.config, number, images) for number, images in enumerate((1, 0, 2))]

    def generate(self, *, seed: int = 0) -> list[Group]:
        """Sample the engine's responses to the prompts."""
        return self.engines.generate(self.prompts(), self.sampling(seed=seed))

    def sampling(self, *, seed: int = 0) -> Sampling:
        return Sampling(n=3, temperature=1.0, top_p=self.config.rollout.top_p, max_new_tokens=12, seed=seed)

    def gap(self, groups: Sequence[Group], *, adapter: bool = True) -> float:
        """Return the mean difference between the log-probs of engine and policy. Raises Broken when it is above the
        bound."""
        of_engine = [part.logprobs[part.sampled] for group in groups for part in group.segments]
        gap = _mean_gap(of_engine, self.policy_logprobs(groups, adapter=adapter))
        if not gap <= self.bound:
            raise Broken(f"engine and trainer differ by {gap:.2g}, the bound is {self.bound:g}")
        return gap

    def policy_logprobs(self, groups: Sequence[Group], *, adapter: bool) -> list[Floats]:
        """Return the policy's log-probs of the sampled tokens, one array per response."""
        samples = to_samples(groups)
        rows = self.policy.logprobs(samples, adapter=adapter)
        return [row[sample.sampled] for row, sample in zip(rows, samples, strict=True)]

    def sync_base(self, weight_sync: WeightSync) -> int:
        """Sync the base, then the adapter, which a new base removes; return the bytes of the base.

        Raises SyncError when digests differ.
        """
        self.version += 1
        num_bytes = weight_sync.send("base", version=self.version, readback=None)
        weight_sync.send("adapter", version=self.version, readback=None)
        return num_bytes

    def sync_adapter(self) -> None:
        self.version += 1
        self.memory_sync.sync(self.version)


def settings(model: str, output: str, *, backend: str, has_gpu: bool) -> dict[str, Any]:
    """Settings of a run with adapters, whose policy and engine share a device unless `backend` is nccl."""
    colocated = backend != "nccl"
    vllm: dict[str, Any] = {"cpu_kv_cache_gib": 0.25}
    if has_gpu:
        vllm = {"gpu_memory_utilization": 0.3, "enable_sleep": colocated, "sync_backend": backend}
    return {
        "actor": {"model_name_or_path": model},
        "data": {"prompt_dataset": "none", "max_len": 512, "max_pixels": 200 * 200},
        "reward": {"functions": {"format": 1.0}},
        # With top_p below 1 the engine's log-probs are the model's, both of sampled tokens and of given ones.
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 4, "max_new_tokens": 16, "top_p": 0.9},
        "train": {"batch_size": 16, "max_steps": 1, "colocate_all": colocated},
        "vllm": vllm,
        # vLLM's LoRA kernels for GPUs support half precision only.
        "ds": {"param_dtype": "bf16" if has_gpu else "fp32", "lora": {"rank": 8}},
        "ckpt": {"output_dir": output},
    }


@contextmanager
def shared(folder: Path) -> Iterator[Pair]:
    """Policy and engine on the first device."""
    with _started(folder, backend="ipc" if torch.cuda.is_available() else "shm") as pair:
        yield pair


@contextmanager
def apart(folder: Path) -> Iterator[Pair]:
    """Policy and engine on separate GPUs. Raises Skipped on machines with fewer than two."""
    if torch.cuda.device_count() < 2:
        raise Skipped(f"needs two visible GPUs, there is {torch.cuda.device_count()}")
    with _started(folder, backend="nccl") as pair:
        yield pair


@contextmanager
def _started(folder: Path, *, backend: str) -> Iterator[Pair]:
    model = models.build(folder)
    has_gpu = torch.cuda.is_available()
    config = RlConfig.model_validate(settings(model, str(folder), backend=backend, has_gpu=has_gpu))
    processor = processor_of(model, config.data)
    adapter = actor_adapter_plan(config, processor)
    with session() as machines, ExitStack() as stack:
        builder = _Builder(machines, plan(**plan_arguments(config, machines)), stack)
        progress = _SilentProgress()
        starts: list[Callable[[], Any]] = [
            partial(builder.engines, config, progress, adapter),
            partial(builder.learners, config, processor, adapter=adapter, num_rows=64, say=progress.say),
        ]
        # As in `RoleBuilder.roles`: vLLM counts memory that others take on its GPU during its start as its own.
        first = [starts.pop(0)()] if has_gpu else []
        engines, learners = [*first, *run_parallel(*starts)]
        group: WorkerGroup[ChangeablePolicy] = builder.groups["actor"]
        check = adapter_check(config, processor, engines, learners.policy, adapter)
        assert check is not None
        yield Pair(
            config,
            processor,
            engines,
            learners.policy,
            group,
            _weight_sync(config, group, engines, adapter, backend="shm"),
            _weight_sync(config, group, engines, adapter, backend=backend) if has_gpu else None,
            check,
        )


def _weight_sync(
    config: RlConfig,
    policy: WorkerGroup[ChangeablePolicy],
    engines: RemoteEngines,
    adapter: AdapterPlan | None,
    *,
    backend: str,
) -> WeightSync:
    # Several buckets, however small the model is.
    vllm = config.vllm.model_copy(update={"sync_backend": backend, "bucket_mib": 1.0})
    return WeightSync(policy, engines, plan_sync(adapter, ds=config.ds, vllm=vllm, vision_trains=True))


def generates(pair: Pair) -> str:
    """Check that the engine's log-probs, of decode and of prefill, are the policy's."""
    pair.sync_adapter()
    started = time.monotonic()
    groups = pair.generate()
    seconds = time.monotonic() - started
    tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
    gap = pair.gap(groups)
    rows = pair.engines.score(groups)
    segments = [segment for group in groups for segment in group.segments]
    scored = [row[segment.sampled] for row, segment in zip(rows, segments, strict=True)]
    decode_gap = _mean_gap(scored, [segment.logprobs[segment.sampled] for segment in segments])
    if not decode_gap <= pair.bound:
        raise Broken(f"the engine's decode and prefill differ by {decode_gap:.2g}, the bound is {pair.bound:g}")
    return (
        f"{tokens} tokens in {seconds:.1f} s; the trainer differs by {gap:.1g}, prefill by {decode_gap:.1g} "
        f"(bound {pair.bound:g})"
    )


def syncs_by_memory(pair: Pair) -> str:
    """Check weight sync through shared memory (`vllm.sync_backend` shm)."""
    return _synced(pair, pair.memory_sync)


def syncs_by_device(pair: Pair) -> str:
    """Check weight sync from GPU to GPU (`vllm.sync_backend` ipc or nccl)."""
    if pair.device_sync is None:
        raise Skipped("no CUDA device")
    return _synced(pair, pair.device_sync)


def _synced(pair: Pair, weight_sync: WeightSync) -> str:
    """Sync weights x 1.5, and then the old ones: digests, responses and log-probs must follow each time."""
    pair.sync_base(weight_sync)
    before, old_digest = pair.generate(), _fingerprint(pair)
    pair.policy_group.call(lambda policy: policy.scale(_FACTOR))
    try:
        started = time.monotonic()
        num_bytes = pair.sync_base(weight_sync)
        seconds = time.monotonic() - started
        after, new_digest = pair.generate(), _fingerprint(pair)
        gap = pair.gap(after)
    finally:
        # The next checks start with the original weights.
        pair.policy_group.call(lambda policy: policy.restore())
    if new_digest == old_digest:
        raise Broken(f"the engine's digest {old_digest[:12]} did not change after weights x {_FACTOR}")
    if _sampled_tokens(before) == _sampled_tokens(after):
        raise Broken(f"the engine's responses did not change after weights x {_FACTOR}")
    pair.sync_base(weight_sync)
    if _fingerprint(pair) != old_digest:
        raise Broken("the engine does not have the old digest after the old weights were synced again")
    old_gap = pair.gap(pair.generate())
    return (
        f"{num_bytes / 2**20:.1f} MiB in {seconds:.2f} s, digests and responses changed, log-probs differ by "
        f"{max(gap, old_gap):.1g}"
    )


def sleeps(pair: Pair) -> str:
    """Check that a sleeping engine frees its memory pool, and responds as before when it wakes."""
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device")
    before = _greedy_response(pair)
    pair.engines.group.call(lambda engine: engine.wake())
    awake, total = torch.cuda.mem_get_info()
    pair.engines.group.call(lambda engine: engine.sleep())
    asleep, _ = torch.cuda.mem_get_info()
    pool = pair.config.vllm.gpu_memory_utilization * total - _OUTSIDE_POOL
    after = _greedy_response(pair)
    freed = (asleep - awake) / pool
    if not freed > _FREED_SHARE:
        raise Broken(f"a sleeping engine frees {freed:.0%} of {pool / GIB:.1f} GiB, not {_FREED_SHARE:.0%}")
    if _sampled_tokens(before) != _sampled_tokens(after):
        raise Broken("the engine responds differently after sleep")
    gap = pair.gap(pair.generate())
    return (
        f"{(asleep - awake) / GIB:.1f} GiB freed, {freed:.0%} of its pool; the same response, log-probs differ by "
        f"{gap:.1g}"
    )


def _greedy_response(pair: Pair) -> list[Group]:
    """Return the greedy response to a single prompt: other requests in the batch would change the order of sums."""
    greedy = Sampling(n=1, temperature=0.0, top_p=1.0, max_new_tokens=12, seed=0)
    return pair.engines.generate(pair.prompts()[:1], greedy)


def adapts(pair: Pair) -> str:
    """Check that the engine computes what the policy computes, with and without the adapter in one batch."""
    pair.sync_base(pair.memory_sync)
    _randomize_adapter(pair, 0)
    pair.sync_adapter()
    held = pair.engines.status()[0]["adapter"]
    if held is None or held["version"] != pair.version:
        raise Broken(f"the engine holds the adapter {held}, after a sync of version {pair.version}")
    sampling = pair.sampling(seed=1)
    gaps, effects = [], []
    for prompt in pair.prompts():
        # Both run at the same time, and share batches.
        (adapted,), (plain,) = pair.engines.respond_each(prompt, sampling, adapter=(True, False))
        gaps += [pair.gap([adapted]), pair.gap([plain], adapter=False)]
        on, off = (pair.policy_logprobs([adapted], adapter=adapter) for adapter in (True, False))
        effects.append(_mean_gap(on, off))
    if not max(effects) > 2 * max(gaps):
        raise Broken(
            f"the adapter's effect of {max(effects):.2g} is too small compared with the gap of {max(gaps):.2g}"
        )
    return (
        f"log-probs differ by {max(gaps):.1g} with and without it in one batch; the adapter changes them by "
        f"{max(effects):.1g}"
    )


def checks_adapters(pair: Pair) -> str:
    """Check that a correct engine passes the adapter check after every sync."""
    metrics = []
    count = _NUM_SYNCS["cuda" if torch.cuda.is_available() else "cpu"]
    for number in range(count):
        _randomize_adapter(pair, number)
        pair.sync_adapter()
        metrics.append(pair.adapters.check(pair.version))
    worst = max(line["verify/adapters/gap"] for line in metrics)
    return f"{count} weight syncs pass, log-probs differ by at most {worst:.1g}"


def _randomize_adapter(pair: Pair, seed: int) -> None:
    pair.policy_group.call(lambda policy: policy.randomize_adapter(seed))


def _prompt(processor: Processor, config: RlConfig, index: int, images: int) -> Prompt:
    """Return a prompt with images of noise, equal every time."""
    rng = np.random.default_rng(index)
    side = processor.resize_factor or 0
    sizes = [processor.target_size((side * (4 + i), side * 4)) for i in range(images)]
    media = tuple(
        InlineMedia(f"self-test:{index}.{i}", (w, h), rng.integers(0, 255, (h, w, 3), dtype=np.uint8))
        for i, (w, h) in enumerate(sizes)
    )
    text = processor.render("how many dots?", num_images=images, columns=config.data)
    tokens, request = processor.encode(text, sizes)
    source = f"self-test:{index}"
    return Prompt(index=index, source=source, text=text, tokens=tokens, request=request, label=None, media=media)


def _fingerprint(pair: Pair) -> str:
    return str(pair.engines.status()[0]["fingerprint"])


def _sampled_tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [segment.tokens[segment.sampled].tolist() for group in groups for segment in group.segments]


def _mean_gap(one: Sequence[Floats], two: Sequence[Floats]) -> float:
    return float(np.abs(np.concatenate(one).astype(np.float64) - np.concatenate(two)).mean())
