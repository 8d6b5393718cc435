"""`vlmrl doctor --config run.yaml`: estimate the memory of a run's roles, and check that this machine has it."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vlmrl.config.actor import Model, Ref
from vlmrl.config.critic import Critic
from vlmrl.config.data import Columns
from vlmrl.config.distill import Distill
from vlmrl.config.pairs import PairData
from vlmrl.config.reward import Reward
from vlmrl.config.roles import REWARD_MODELS
from vlmrl.config.stages import DpoConfig, RmConfig, SamplingConfig, SftConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ClusterError
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.models.configured import ConfiguredModels
from vlmrl.models.memory import (
    colocated_critic,
    engine_memory,
    inner_teacher_memory,
    reference_memory,
    reward_model_memory,
    sequence_bytes,
    teacher_memory,
    trainer_memory,
)
from vlmrl.models.memory_parts import MemoryPart, RoleMemory
from vlmrl.models.sizes import Sizes, with_value_head
from vlmrl.plugins import Processor
from vlmrl.system.machine import free_memory

GIB = 2**30
_IMPORTS = dict.fromkeys(("actor", "critic", "ref", "teacher", *REWARD_MODELS), 0.55 * GIB) | {"vllm": 1.3 * GIB}
"""Memory of a role after its imports, measured on Linux; an engine is two processes. On GPU machines it is main memory.
"""
_KEPT_BY_MALLOC = 0.67
"""Memory that glibc keeps on CPU after a training pass, as a share of the activations, measured after
`system.malloc.keep_memory`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of a machine."""

    device: str
    """cpu or cuda."""
    device_bytes: float
    """Memory of one GPU; on CPU the free main memory."""
    host_bytes: float
    """Free main memory."""


@dataclass(frozen=True, slots=True)
class Share:
    """Roles that share one memory."""

    name: str
    needed: float
    available: float
    roles: tuple[RoleMemory, ...]
    on_device: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Estimated memory of a run."""

    roles: tuple[tuple[RoleMemory, int], ...]
    """Each with its number of processes."""
    shares: tuple[Share, ...]
    sequence_bytes: float
    """KV cache of a sequence of the greatest length; 0 without engines."""
    settings_of_length: str = ""
    """The settings that the greatest length follows from."""

    def check(self) -> None:
        """Raise ClusterError, with the setting to change, if the run does not fit."""
        if self.sequence_bytes > (cache := sum(_part_bytes(role, "KV cache") for role, _ in self.roles)):
            raise ClusterError(
                f"an engine has {cache / GIB:.2f} GiB for its KV cache, and one sequence of "
                f"{self.settings_of_length} takes {self.sequence_bytes / GIB:.2f}: raise vllm.gpu_memory_utilization, "
                "vllm.tensor_parallel_size, or on CPU vllm.cpu_kv_cache_gib"
            )
        for share in self.shares:
            if share.needed <= share.available:
                continue
            adjustable = [
                (part, role)
                for role in share.roles
                for part in role.parts
                if part.in_host_memory != share.on_device and part.flag
            ]
            if not adjustable:
                raise ClusterError(
                    f"{share.name}: the libraries of the run take about {share.needed / GIB:.1f} GiB of "
                    f"{share.available / GIB:.1f}: free some, or use a machine with more"
                )
            part, role = max(adjustable, key=lambda pair: pair[0].num_bytes)
            raise ClusterError(
                f"{share.name}: the run takes about {share.needed / GIB:.1f} GiB of {share.available / GIB:.1f}; the "
                f"largest part is {part.name} of {role.name}, {part.num_bytes / GIB:.1f} GiB: {part.flag}"
            )


def this_machine() -> Machine:
    """Return the memory of this machine."""
    free, _ = free_memory()
    if torch.cuda.is_available():
        return Machine("cuda", float(torch.cuda.mem_get_info()[1]), free)
    return Machine("cpu", free, free)


def show(config: TrainingConfig, *, as_json: bool = False) -> int:
    """Print the memory plan of a run on this machine; return the exit code, 0.

    Raises ClusterError if the run does not fit, ConfigError if its model or its adapter's target layers do not exist.
    """
    machine = this_machine()
    plan = memory_plan(config, machine)
    if as_json:
        roles = [{"role": role.name, "processes": n, "parts": list(map(asdict, role.parts))} for role, n in plan.roles]
        sys.stdout.write(json.dumps({"device": machine.device, "roles": roles}, indent=2) + "\n")
    else:
        Console().print(memory_table(config, plan, machine))
    plan.check()
    return 0


def memory_plan(config: TrainingConfig, machine: Machine, models: ConfiguredModels | None = None) -> MemoryPlan:
    """Estimate the memory of a run's roles on a machine, from configurations only, without weights.

    `models`: by default they are read anew.
    """
    models = models or ConfiguredModels()
    size, processor = models.read(config.actor.model_name_or_path, config)
    adapter = models.adapter(config.actor, config.ds.lora, processor)
    ranks = _ranks(config.actor)
    tokens, patches = largest_pack(config, processor, ranks, sequence_size=config.ds.sequence_parallel_size)
    actor = trainer_memory(
        with_value_head(size) if isinstance(config, RmConfig) else size,
        model=config.actor,
        ds=config.ds,
        adapter=adapter,
        ranks=ranks,
        tokens=tokens,
        patches=patches,
        device=machine.device,
        cache_bytes=_cache_bytes(config, config.actor, size, adapter),
        has_average=isinstance(config, RlConfig) and config.train.enable_ema,
    )
    if isinstance(config, SftConfig) and config.sft.teacher_model_name_or_path is not None:
        teacher, _ = models.read(config.sft.teacher_model_name_or_path, config)
        actor = RoleMemory(actor.name, (*actor.parts, inner_teacher_memory(teacher, ds=config.ds, ranks=ranks)))
    tokens, _ = largest_pack(config, processor, ranks)  # of frozen models
    roles, sequence, settings_of_length = [(actor, ranks)], 0.0, ""
    if isinstance(config, DpoConfig):
        roles += _reference(config, tokens, machine.device, models)
    if isinstance(config, RlConfig):
        if config.has_critic:
            roles.append(_critic(config, actor, machine.device, models))
        roles += _frozen(config, max(tokens, config.rollout.max_tokens_per_gpu or 0), machine.device, models)
    sampling = config.generation if isinstance(config, SamplingConfig) else config
    if isinstance(sampling, RlConfig | EvalConfig):
        sequence = sequence_bytes(size, vllm=sampling.vllm, ds=config.ds, tokens=sampling.max_sequence_tokens)
        settings_of_length = sampling.settings_of_length
        serving = engine_memory(
            size,
            vllm=sampling.vllm,
            ds=config.ds,
            adapter=adapter,
            device=machine.device,
            device_bytes=machine.device_bytes,
        )
        roles.append((serving, sampling.vllm.num_engines * sampling.vllm.gpus_per_engine))
    separate = [role.name for role, _ in roles if role.name != "critic" or not _is_with_actor(config)]
    complete = tuple((_with_process(role, machine, has_imports=role.name in separate), count) for role, count in roles)
    return MemoryPlan(complete, tuple(_shares(config, complete, machine)), sequence, settings_of_length)


def _critic(config: RlConfig, actor: RoleMemory, device: str, models: ConfiguredModels) -> tuple[RoleMemory, int]:
    """Return the critic and its number of ranks. If it starts from the actor's model, both share image features."""
    critic = config.resolved_critic
    model = critic.as_model
    size, processor = models.read(model.model_name_or_path, config)
    adapter = models.adapter(model, config.ds.lora, processor)
    ranks = _ranks(critic)
    tokens, patches = largest_pack(config, processor, ranks, sequence_size=config.ds.sequence_parallel_size)
    role = trainer_memory(
        with_value_head(size),
        role="critic",
        model=model,
        ds=config.ds.model_copy(update={"zero_stage": critic.zero_stage}),
        adapter=adapter,
        ranks=ranks,
        tokens=tokens,
        patches=patches,
        device=device,
        cache_bytes=_cache_bytes(config, model, size, adapter),
    )
    if not config.critic_is_with_actor:
        return role, ranks
    is_one_model = model.model_name_or_path == config.actor.model_name_or_path
    return colocated_critic(actor, role, shares_features=is_one_model), ranks


def _reference(
    config: RlConfig | DpoConfig, tokens: int, device: str, models: ConfiguredModels
) -> list[tuple[RoleMemory, int]]:
    """The reference with its number of ranks; none if it is no model of its own."""
    if not config.has_reference:
        return []
    size, _ = models.read(config.ref.model_name_or_path or config.actor.model_name_or_path, config)
    return [(reference_memory(size, ds=config.ds, tokens=tokens, device=device), _ranks(config.ref))]


def _frozen(config: RlConfig, tokens: int, device: str, models: ConfiguredModels) -> list[tuple[RoleMemory, int]]:
    """Reference, teacher and reward models, each with its number of ranks."""
    roles = _reference(config, tokens, device, models)
    distill = config.algo.distill
    if distill.teacher_model_name_or_path is not None:
        size, _ = models.read(distill.teacher_model_name_or_path, config)
        ranks, is_offloaded = _ranks(distill), distill.offload
        role = teacher_memory(size, ds=config.ds, ranks=ranks, tokens=tokens, device=device, is_offloaded=is_offloaded)
        roles.append((role, ranks))
    reward = config.reward
    paths = (reward.model_name_or_path, reward.process_model_name_or_path)
    for name, path in zip(REWARD_MODELS, paths, strict=True):
        if path is None:
            continue
        size, _ = models.read(path, config)
        role = reward_model_memory(
            name,
            with_value_head(size),
            ds=config.ds,
            ranks=_ranks(reward),
            tokens=tokens,
            device=device,
            is_offloaded=reward.offload,
        )
        roles.append((role, _ranks(reward)))
    return roles


def largest_pack(
    config: TrainingConfig, processor: Processor, ranks: int, *, sequence_size: int = 1
) -> tuple[int, int]:
    """Tokens and vision patches of the largest pack that a rank may get, of prompts full of images.

    `sequence_size` ranks share the tokens of a pack. It is bounded by their token budget and by their share of an
    optimizer step, and holds at least one sample.
    """
    response = config.max_response_tokens if isinstance(config, RlConfig) else 0
    longest = config.max_sequence_tokens if isinstance(config, RlConfig) else config.data.max_len
    # The responses of a pair are never in different packs.
    has_steps = isinstance(config, RmConfig) and config.rm.kind == "process"
    at_least = 2 if isinstance(config.data, PairData) and not has_steps else 1
    samples = -(-config.train.batch_size * sequence_size // ranks) * at_least
    tokens = min(
        config.train.max_tokens_per_gpu * sequence_size,
        min(samples, config.train.micro_batch_size or samples) * longest,
    )
    tokens = max(tokens, at_least * longest)
    dummy = processor.dummy_sample()
    if dummy is None:
        return tokens, 0
    # Every rank encodes all images of a pack, so they count for each (`cluster.learners.packing_plan`).
    with_images = max(tokens // sequence_size, at_least * longest)
    (width, height, *_), patches = dummy.media[0].size, math.prod(processor.grid(dummy.media[0].size))
    if isinstance(config, RlConfig) and config.has_agent:  # images may come in any turn
        most = config.agent.max_images * config.data.max_pixels * patches / (width * height)
        per_sequence = min(most, longest * patches / processor.num_tokens((width, height)))
        return tokens, int(with_images * per_sequence / longest)
    most = _most_pixels(config.data) * patches / (width * height)
    per_prompt = min(most, config.data.max_len * patches / processor.num_tokens((width, height)))
    num_responses = config.rollout.n_samples_per_prompt if isinstance(config, RlConfig) else 1
    if config.train.layout != "shared":
        num_responses = 1
    return tokens, int(with_images * per_prompt / (config.data.max_len + num_responses * response))


def _most_pixels(data: Columns) -> int:
    """Most pixels of a prompt's images and videos; two frames of a video make one patch, so a frame counts half."""
    pixels = data.max_images_per_prompt * data.max_pixels
    if data.video_key is None:
        return pixels
    of_video = min(data.fps_max_frames * data.video_max_pixels, data.video_total_pixels * 2) // 2
    return pixels + data.max_videos_per_prompt * of_video


def memory_table(config: TrainingConfig, plan: MemoryPlan, machine: Machine) -> Table:
    """Return the plan as a table, a column per role."""
    place = "main memory" if machine.device == "cpu" else "each GPU"
    table = Table(title=f"memory of vlmrl {config.verb}, GiB per process; {machine.device_bytes / GIB:.1f} in {place}")
    table.add_column("")
    for role, count in plan.roles:
        table.add_column(f"{role.name} x{count}", justify="right")
    names = dict.fromkeys(part.name for role, _ in plan.roles for part in role.parts)
    for name in names:
        table.add_row(name, *(_gib(_part_bytes(role, name)) for role, _ in plan.roles))
    table.add_section()
    totals = (sum(part.num_bytes for part in role.parts) for role, _ in plan.roles)
    table.add_row("total", *map(_gib, totals))
    return table


def _shares(config: TrainingConfig, roles: tuple[tuple[RoleMemory, int], ...], machine: Machine) -> list[Share]:
    all_roles = tuple(role for role, _ in roles)
    if machine.device == "cpu":
        needed = sum(count * sum(part.num_bytes for part in role.parts) for role, count in roles)
        # Without a GPU there is only one memory: what would be in host memory counts like the rest.
        return [Share("main memory", needed, machine.host_bytes, tuple(_all_on_device(role) for role in all_roles))]
    shares = []
    for names in _pools(config):
        pool = tuple(role for role in all_roles if role.name in names)
        needs = {role.name: role.num_bytes() for role in pool}
        needed = sum(needs.values())
        if isinstance(config, RlConfig | SamplingConfig) and config.vllm.enable_sleep and "vllm" in needs:
            # Engines sleep while other roles train. Those free the memory of their passes, and keep the rest.
            others = [p for role in pool if role.name != "vllm" for p in role.parts]
            kept = sum(p.num_bytes for p in others if p.stays and not p.in_host_memory)
            needed = max(needs["vllm"] + kept, needed - needs["vllm"])
        if pool:
            shares.append(Share(f"a GPU of {' and '.join(needs)}", needed, machine.device_bytes, pool))
    on_host = sum(count * role.num_bytes(on_device=False) for role, count in roles)
    return [*shares, Share("main memory", on_host, machine.host_bytes, all_roles, on_device=False)]


def _pools(config: TrainingConfig) -> list[set[str]]:
    """Sets of roles that share GPUs; a role with its own GPUs is a set by itself."""
    pools = [set(pool) for pool in config.pools or [frozenset({"actor"})]]
    for pool in pools:
        if "actor" in pool and _is_with_actor(config):
            pool.add("critic")
    pooled = set().union(*pools)
    return [*pools, *({name} for name in ("critic", "ref", "teacher", "vllm") if name not in pooled)]


def _is_with_actor(config: TrainingConfig) -> bool:
    return isinstance(config, RlConfig) and config.critic_is_with_actor


def _ranks(role: Model | Critic | Ref | Distill | Reward) -> int:
    return role.num_nodes * role.num_gpus_per_node


def _cache_bytes(config: TrainingConfig, model: Model, size: Sizes, adapter: AdapterPlan | None) -> float:
    """Size of the cache of image features; 0 when the vision tower trains, which makes them stale."""
    if size.tower is None:
        return 0.0
    return 0.0 if vision_trains(model, adapter) else config.vision.cache_gib * GIB


def _with_process(role: RoleMemory, machine: Machine, *, has_imports: bool) -> RoleMemory:
    process = MemoryPart("process", _IMPORTS[role.name], "", in_host_memory=machine.device != "cpu")
    imports = (process,) if has_imports else ()
    if machine.device != "cpu":
        return RoleMemory(role.name, (*role.parts, *imports))
    kept = [
        MemoryPart("kept by malloc", _KEPT_BY_MALLOC * part.num_bytes, part.flag)
        for part in role.parts
        if part.name == "activations"
    ]
    return RoleMemory(role.name, (*role.parts, *kept, *imports))


def _all_on_device(role: RoleMemory) -> RoleMemory:
    return RoleMemory(role.name, tuple(MemoryPart(part.name, part.num_bytes, part.flag) for part in role.parts))


def _part_bytes(role: RoleMemory, name: str) -> float:
    return sum(part.num_bytes for part in role.parts if part.name == name)


def _gib(num_bytes: float) -> Any:
    return f"{num_bytes / GIB:.2f}" if num_bytes else ""
