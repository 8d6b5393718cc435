"""An engine and a policy as a run has them, and what must hold between them: equal log-probs, publishes by every way,
sleep, adapters.

Everything goes through the code of a run: roles are actors of a Ray session of its own, and weights take a run's way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.placement import plan
from vlmrl.cluster.roles import roles_of
from vlmrl.cluster.session import session
from vlmrl.cluster.sync_plan import plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.commands.checks import adapter_check
from vlmrl.commands.preflight import plan_of
from vlmrl.commands.self_test import models
from vlmrl.commands.self_test.outcome import Broken, Skipped
from vlmrl.config.run import RlConfig
from vlmrl.data.media import InlineMedia
from vlmrl.data.responses import to_samples
from vlmrl.learning.policy import Policy
from vlmrl.learning.settings import PolicySettings
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.adapters import adapter_tensors
from vlmrl.parallel import together
from vlmrl.plugins import Processor, processor_of
from vlmrl.rollout.sampling import Sampling
from vlmrl.system.machine import GIB
from vlmrl.types import Floats, Group, Prompt
from vlmrl.verify.adapters import AdapterCheck
from vlmrl.verify.logprobs import largest_gap

_FACTOR = 1.5
_PROBES = {"cuda": 20, "cpu": 6}
"""Publishes without an alarm. On CPU, where rounding is fp32's, fewer tell as much."""
_POOL = 0.9
"""Share of an engine's memory that it must give back while it sleeps."""
_OUTSIDE_POOL = GIB
"""Bytes of a GPU that an engine keeps whatever it does: CUDA itself, kernels, captured graphs."""


class Changeable(Policy):
    """A policy whose weights can be changed without learning."""

    _kept: Mapping[str, Tensor] | None = None

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply every weight of the base; `restore` undoes it."""
        named = {name: p for name, p in self._net.named_parameters() if ".lora_" not in name}
        self._kept = {name: p.detach().clone() for name, p in named.items()}
        for parameter in named.values():
            parameter.mul_(factor)
        # Nothing of the base trains, so that what the tower made of an image is kept.
        self._forward.forget()

    @torch.no_grad()
    def restore(self) -> None:
        """Take back what `scale` did, to the last bit."""
        assert self._kept is not None, "nothing was scaled"
        named = dict(self._net.named_parameters())
        for name, kept in self._kept.items():
            named[name].copy_(kept)
        self._forward.forget()

    @torch.no_grad()
    def stir(self, seed: int) -> None:
        """Make another adapter of it, one whose effect shows."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in adapter_tensors(self._net):
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)


class _Builder(RoleBuilder):
    """Builds a `Changeable` policy where a run has a `Policy`."""

    def policy(self, settings: PolicySettings) -> WorkerGroup[Changeable]:
        build = partial(Changeable, settings)
        return self.group("actor", build, timeout_s=settings.loop.timeout_s, distributed=True)


class _Quiet:
    """Hears what a run would show."""

    def say(self, what: str) -> None:
        """Nobody reads it."""

    def generated(self, done: int, total: int) -> None:
        """Nobody waits."""


@dataclass
class Pair:
    """An engine and a policy of the same model, with an adapter."""

    config: RlConfig
    tools: Processor
    engines: RemoteEngines
    policy: RemotePolicy
    policy_group: WorkerGroup[Changeable]
    memory_sync: WeightSync
    """Through the memory that processes share."""
    device_sync: WeightSync | None
    """From GPU to GPU; None without one."""
    adapters: AdapterCheck
    version: int = 0

    @property
    def bound(self) -> float:
        """How far log-probs of both may be apart on average: that of a run in this type."""
        return largest_gap(self.config)

    def prompts(self) -> list[Prompt]:
        """One with an image, one without, one with two."""
        return [_prompt(self.tools, self.config, number, images) for number, images in enumerate((1, 0, 2))]

    def generate(self, *, seed: int = 0) -> list[Group]:
        """What the engine answers to them."""
        return self.engines.generate(self.prompts(), self.sampling(seed=seed))

    def sampling(self, *, seed: int = 0) -> Sampling:
        return Sampling(n=3, temperature=1.0, top_p=self.config.rollout.top_p, max_new_tokens=12, seed=seed)

    def gap(self, groups: Sequence[Group], *, adapter: bool = True) -> float:
        """The mean difference between the engine's log-probs of its responses and the policy's. Broken when they are
        above the bound."""
        told = [rollout.logprobs[rollout.sampled] for group in groups for rollout in group.rollouts]
        found = _mean_gap(told, self._own(groups, adapter=adapter))
        if not found <= self.bound:
            raise Broken(f"engine and trainer are {found:.2g} apart, the bound is {self.bound:g}")
        return found

    def _own(self, groups: Sequence[Group], *, adapter: bool) -> list[Floats]:
        samples = to_samples(groups)
        rows = self.policy.logprobs(samples, adapter=adapter)
        return [row[sample.sampled] for row, sample in zip(rows, samples, strict=True)]

    def publish_base(self, weight_sync: WeightSync) -> int:
        """Base, then adapter, which a new base takes away; the bytes of the base. SyncError where digests differ."""
        self.version += 1
        sent = weight_sync.send("base", version=self.version, readback=None)
        weight_sync.send("adapter", version=self.version, readback=None)
        return sent

    def publish_adapter(self) -> None:
        self.version += 1
        self.memory_sync.sync(self.version)


def settings(model: str, output: str, *, backend: str, has_gpu: bool) -> dict[str, Any]:
    """Of a run with adapters whose policy and engine share a device unless `backend` is nccl."""
    together = backend != "nccl"
    vllm: dict[str, Any] = {"cpu_kv_cache_gib": 0.25}
    if has_gpu:
        vllm = {"gpu_memory_utilization": 0.3, "enable_sleep": together, "sync_backend": backend}
    return {
        "actor": {"model_name_or_path": model},
        "data": {"prompt_dataset": "none", "max_len": 512, "max_pixels": 200 * 200},
        "reward": {"functions": {"format": 1.0}},
        # Below top_p 1 both an engine's log-probs of what it samples and its scores are the model's own.
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 4, "max_new_tokens": 16, "top_p": 0.9},
        "train": {"batch_size": 16, "max_steps": 1, "colocate_all": together},
        "vllm": vllm,
        # vLLM's LoRA kernels for GPUs take half precision alone.
        "ds": {"param_dtype": "bf16" if has_gpu else "fp32", "lora": {"rank": 8}},
        "ckpt": {"output_dir": output},
    }


@contextmanager
def shared(folder: Path) -> Iterator[Pair]:
    """Both on the first device."""
    with _started(folder, backend="ipc" if torch.cuda.is_available() else "shm") as pair:
        yield pair


@contextmanager
def apart(folder: Path) -> Iterator[Pair]:
    """Each on a GPU of its own. Skipped where there is one."""
    if torch.cuda.device_count() < 2:
        raise Skipped(f"needs two visible GPUs, there is {torch.cuda.device_count()}")
    with _started(folder, backend="nccl") as pair:
        yield pair


@contextmanager
def _started(folder: Path, *, backend: str) -> Iterator[Pair]:
    model = models.build(folder)
    has_gpu = torch.cuda.is_available()
    config = RlConfig.model_validate(settings(model, str(folder), backend=backend, has_gpu=has_gpu))
    tools = processor_of(model, config.data)
    adapter = plan_of(config, tools)
    with session() as machines, ExitStack() as stack:
        builder = _Builder(machines, plan(**roles_of(config, machines)), stack)
        quiet = _Quiet()
        starts: list[Callable[[], Any]] = [
            partial(builder.engines, config, quiet, adapter),
            partial(builder.learners, config, tools, adapter=adapter, num_rows=64, say=quiet.say),
        ]
        # As in `RoleBuilder.roles`: vLLM takes for its own what others load onto its GPU while it measures.
        first = [starts.pop(0)()] if has_gpu else []
        engines, learners = [*first, *together(*starts)]
        group: WorkerGroup[Changeable] = builder.groups["actor"]
        check = adapter_check(config, tools, engines, learners.policy, adapter)
        assert check is not None
        yield Pair(
            config,
            tools,
            engines,
            learners.policy,
            group,
            _weight_sync(config, group, engines, adapter, backend="shm"),
            _weight_sync(config, group, engines, adapter, backend=backend) if has_gpu else None,
            check,
        )


def _weight_sync(
    config: RlConfig,
    policy: WorkerGroup[Changeable],
    engines: RemoteEngines,
    adapter: AdapterPlan | None,
    *,
    backend: str,
) -> WeightSync:
    # Several buckets, however small the model is.
    vllm = config.vllm.model_copy(update={"sync_backend": backend, "bucket_mib": 1.0})
    return WeightSync(policy, engines, plan_sync(adapter, ds=config.ds, vllm=vllm, vision_trains=True))


def generates(pair: Pair) -> str:
    """Responses whose log-probs, and scores, are the policy's."""
    pair.publish_adapter()
    started = time.monotonic()
    groups = pair.generate()
    seconds = time.monotonic() - started
    tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
    gap = pair.gap(groups)
    rows = pair.engines.score(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [row[rollout.sampled] for row, rollout in zip(rows, rollouts, strict=True)]
    apart = _mean_gap(scored, [rollout.logprobs[rollout.sampled] for rollout in rollouts])
    if not apart <= pair.bound:
        raise Broken(f"the engine scores its own responses {apart:.2g} apart, the bound is {pair.bound:g}")
    return f"{tokens} tokens in {seconds:.1f} s, trainer {gap:.1g} apart, scores {apart:.1g} (bound {pair.bound:g})"


def publishes_by_memory(pair: Pair) -> str:
    """Through the memory that processes share (`vllm.sync_backend` shm)."""
    return _published(pair, pair.memory_sync)


def publishes_by_device(pair: Pair) -> str:
    """From GPU to GPU (`vllm.sync_backend` ipc or nccl)."""
    if pair.device_sync is None:
        raise Skipped("no CUDA device")
    return _published(pair, pair.device_sync)


def _published(pair: Pair, weight_sync: WeightSync) -> str:
    """Weights x 1.5, and back: each time the digests agree, the responses follow, and the policy says the same."""
    pair.publish_base(weight_sync)
    before, held = pair.generate(), _fingerprint(pair)
    pair.policy_group.call(lambda policy: policy.scale(_FACTOR))
    try:
        started = time.monotonic()
        sent = pair.publish_base(weight_sync)
        seconds = time.monotonic() - started
        after, holds = pair.generate(), _fingerprint(pair)
        gap = pair.gap(after)
    finally:
        # The checks that follow begin with the model as it was.
        pair.policy_group.call(lambda policy: policy.restore())
    if holds == held:
        raise Broken(f"the engine holds the same digest {held[:12]} before and after weights x {_FACTOR}")
    if _spoken(before) == _spoken(after):
        raise Broken(f"the engine responds the same before and after weights x {_FACTOR}")
    pair.publish_base(weight_sync)
    if _fingerprint(pair) != held:
        raise Broken("the engine does not hold the old digest after the old weights were sent again")
    back = pair.gap(pair.generate())
    return f"{sent / 2**20:.1f} MiB in {seconds:.2f} s, digests and responses changed, {max(gap, back):.1g} apart"


def sleeps(pair: Pair) -> str:
    """Gives its pool back, and answers the same when it wakes."""
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device")
    before = _alone(pair)
    pair.engines.group.call(lambda engine: engine.wake())
    awake, total = torch.cuda.mem_get_info()
    pair.engines.group.call(lambda engine: engine.sleep())
    asleep, _ = torch.cuda.mem_get_info()
    pool = pair.config.vllm.gpu_memory_utilization * total - _OUTSIDE_POOL
    after = _alone(pair)
    given = (asleep - awake) / pool
    if not given > _POOL:
        raise Broken(f"an engine that sleeps gives {given:.0%} of {pool / GIB:.1f} GiB back, not {_POOL:.0%}")
    if _spoken(before) != _spoken(after):
        raise Broken("an engine that slept responds otherwise than before")
    gap = pair.gap(pair.generate())
    return f"{(asleep - awake) / GIB:.1f} GiB given back, {given:.0%} of its pool; the same response, {gap:.1g} apart"


def _alone(pair: Pair) -> list[Group]:
    """The most likely response to one prompt, with nothing else under way that would change how sums are taken."""
    greedy = Sampling(n=1, temperature=0.0, top_p=1.0, max_new_tokens=12, seed=0)
    return pair.engines.generate(pair.prompts()[:1], greedy)


def adapts(pair: Pair) -> str:
    """An adapter arrives; with it and without it the engine answers as the policy does, in one batch."""
    pair.publish_base(pair.memory_sync)
    _stir(pair, 0)
    pair.publish_adapter()
    held = pair.engines.status()[0]["adapter"]
    if held is None or held["version"] != pair.version:
        raise Broken(f"the engine holds the adapter {held} and was sent version {pair.version}")
    sampling = pair.sampling(seed=1)
    gaps, effects = [], []
    for prompt in pair.prompts():
        # Both are under way at once, and share batches.
        (with_it,), (without,) = pair.engines.respond_each(prompt, sampling, adapter=(True, False))
        gaps += [pair.gap([with_it]), pair.gap([without], adapter=False)]
        effects.append(_mean_gap(pair._own([with_it], adapter=True), pair._own([with_it], adapter=False)))
    if not max(effects) > 2 * max(gaps):
        raise Broken(f"the adapter changes {max(effects):.2g}, which cannot be told from the gap of {max(gaps):.2g}")
    return f"with and without it {max(gaps):.1g} apart in one batch; it changes {max(effects):.1g}"


def checks_adapters(pair: Pair) -> str:
    """A sound engine raises no alarm, publish after publish."""
    found = []
    count = _PROBES["cuda" if torch.cuda.is_available() else "cpu"]
    for number in range(count):
        _stir(pair, number)
        pair.publish_adapter()
        found.append(pair.adapters.check(pair.version))
    worst = max(line["verify/adapters/gap"] for line in found)
    return f"{count} publishes without an alarm, at most {worst:.1g} apart"


def _stir(pair: Pair, seed: int) -> None:
    pair.policy_group.call(lambda policy: policy.stir(seed))


def _prompt(tools: Processor, config: RlConfig, index: int, images: int) -> Prompt:
    """A question about noise; asked again, it is the same."""
    rng = np.random.default_rng(index)
    side = tools.resize_factor or 0
    sizes = [(side * (4 + i), side * 4) for i in range(images)]
    media = tuple(
        InlineMedia(f"self-test:{index}.{i}", (w, h), rng.integers(0, 255, (h, w, 3), dtype=np.uint8))
        for i, (w, h) in enumerate(sizes)
    )
    text = tools.render("how many dots?", num_images=images, columns=config.data)
    tokens, request = tools.encode(text, sizes)
    source = f"self-test:{index}"
    return Prompt(index=index, source=source, text=text, tokens=tokens, request=request, label=None, media=media)


def _fingerprint(pair: Pair) -> str:
    return str(pair.engines.status()[0]["fingerprint"])


def _spoken(groups: Sequence[Group]) -> list[list[int]]:
    return [rollout.tokens[rollout.sampled].tolist() for group in groups for rollout in group.rollouts]


def _mean_gap(one: Sequence[Floats], two: Sequence[Floats]) -> float:
    return float(np.abs(np.concatenate(one).astype(np.float64) - np.concatenate(two)).mean())
