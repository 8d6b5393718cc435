"""`vlmrl doctor --config run.yaml`: what the roles of a run take of memory, and whether this machine has it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vlmrl.config.actor import Model, Ref
from vlmrl.config.critic import Critic
from vlmrl.config.reward import Reward
from vlmrl.config.roles import REWARD_MODELS
from vlmrl.config.run import RlConfig, SftConfig
from vlmrl.errors import ClusterError
from vlmrl.models.adapter_plan import AdapterPlan, plan_adapter, vision_trains
from vlmrl.models.load import skeleton
from vlmrl.models.memory import (
    Part,
    Role,
    Sizes,
    engine,
    in_turn_with,
    reference,
    reward_model,
    sequence_bytes,
    sizes,
    trainer,
    with_value_head,
)
from vlmrl.plugins import Processor, processor_of
from vlmrl.system.machine import free_memory

GIB = 2**30
_IMPORTS = dict.fromkeys(("actor", "critic", "ref", *REWARD_MODELS), 0.55 * GIB) | {"vllm": 1.3 * GIB}
"""What a role holds when it has imported its libraries and nothing else, measured on Linux; an engine is two processes.
Beside a GPU it is main memory."""
_HOARDED = 0.67
"""What glibc keeps on CPU of the memory that a training pass frees, as a share of the activations: measured where
`startup.memory` tells it to keep all that it can."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the run would be."""

    device: str
    """cpu or cuda."""
    device_bytes: float
    """Of one GPU; on CPU what is free of main memory."""
    host_bytes: float
    """Free main memory."""


@dataclass(frozen=True, slots=True)
class Share:
    """Roles that live off the same memory."""

    name: str
    needed: float
    available: float
    roles: tuple[Role, ...]
    on_device: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The roles of a run, how many processes each has, and the memory that they share."""

    roles: tuple[tuple[Role, int], ...]
    shares: tuple[Share, ...]
    sequence_bytes: float
    """KV cache of a sequence as long as they come; 0 without engines."""

    def check(self) -> None:
        """Raises ClusterError when a role would not fit, with what to change."""
        if self.sequence_bytes > (cache := sum(_of(role, "KV cache") for role, _ in self.roles)):
            raise ClusterError(
                f"an engine has {cache / GIB:.2f} GiB for its KV cache, and one sequence of data.max_len and "
                f"rollout.max_new_tokens takes {self.sequence_bytes / GIB:.2f}: raise vllm.gpu_memory_utilization, "
                "vllm.tensor_parallel_size, or on CPU vllm.cpu_kv_cache_gib"
            )
        for share in self.shares:
            if share.needed <= share.available:
                continue
            held = [
                (part, role)
                for role in share.roles
                for part in role.parts
                if part.in_host_memory != share.on_device and part.flag
            ]
            if not held:
                raise ClusterError(
                    f"{share.name}: the libraries of the run take about {share.needed / GIB:.1f} GiB, and there are "
                    f"{share.available / GIB:.1f}: free some, or use a machine with more"
                )
            part, role = max(held, key=lambda pair: pair[0].num_bytes)
            raise ClusterError(
                f"{share.name}: the run takes about {share.needed / GIB:.1f} GiB, and there are "
                f"{share.available / GIB:.1f}; most are {part.name} of {role.name}, {part.num_bytes / GIB:.1f} GiB: "
                f"{part.flag}"
            )


def this_machine() -> Machine:
    """Its GPU, or its main memory where there is none."""
    free, _ = free_memory()
    if torch.cuda.is_available():
        return Machine("cuda", float(torch.cuda.mem_get_info()[1]), free)
    return Machine("cpu", free, free)


def show(config: RlConfig | SftConfig, *, as_json: bool = False) -> int:
    """Print the plan of a run on this machine; 0.

    Raises ClusterError when it does not fit, ConfigError when its model or its adapter's targets are not there.
    """
    machine = this_machine()
    plan = memory_plan(config, machine)
    if as_json:
        roles = [{"role": role.name, "processes": n, "parts": list(map(asdict, role.parts))} for role, n in plan.roles]
        sys.stdout.write(json.dumps({"device": machine.device, "roles": roles}, indent=2) + "\n")
    else:
        Console().print(drawn(config, plan, machine))
    plan.check()
    return 0


def memory_plan(config: RlConfig | SftConfig, machine: Machine) -> MemoryPlan:
    """The roles of the run, on a machine like this. Reads configurations, no weights."""
    size, reader = _read(config.actor.model_name_or_path, config)
    adapter = plan_adapter(config.actor, config.ds.lora, reader)
    ranks = _ranks(config.actor)
    tokens, patches = largest_pack(config, reader, ranks)
    actor = trainer(
        size,
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
    roles, sequence = [(actor, ranks)], 0.0
    if isinstance(config, RlConfig):
        longest = config.data.max_len + config.rollout.max_new_tokens
        sequence = sequence_bytes(size, vllm=config.vllm, ds=config.ds, tokens=longest)
        if config.has_critic:
            roles.append(_critic(config, actor, machine.device))
        roles += _frozen(config, max(tokens, config.rollout.max_tokens_per_gpu or 0), machine.device)
        serving = engine(
            size,
            vllm=config.vllm,
            ds=config.ds,
            adapter=adapter,
            device=machine.device,
            device_bytes=machine.device_bytes,
        )
        roles.append((serving, config.vllm.num_engines * config.vllm.tensor_parallel_size))
    alone = [role.name for role, _ in roles if role.name != "critic" or not _is_with_actor(config)]
    whole = tuple((_with_process(role, machine, has_imports=role.name in alone), count) for role, count in roles)
    return MemoryPlan(whole, tuple(_shares(config, whole, machine)), sequence)


def _critic(config: RlConfig, actor: Role, device: str) -> tuple[Role, int]:
    """The critic, and how many ranks it has. Where it begins as the actor's model, both have the features of images
    together."""
    critic = config.whole_critic
    model = critic.as_model
    size, reader = _read(model.model_name_or_path, config)
    adapter = plan_adapter(model, config.ds.lora, reader)
    ranks = _ranks(critic)
    tokens, patches = largest_pack(config, reader, ranks)
    role = trainer(
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
    return in_turn_with(actor, role, shares_features=is_one_model), ranks


def _frozen(config: RlConfig, tokens: int, device: str) -> list[tuple[Role, int]]:
    """Reference and reward models, and how many ranks they have."""
    found = []
    if config.has_reference:
        size, _ = _read(config.ref.model_name_or_path or config.actor.model_name_or_path, config)
        found.append((reference(size, ds=config.ds, tokens=tokens, device=device), _ranks(config.ref)))
    reward = config.reward
    paths = (reward.model_name_or_path, reward.process_model_name_or_path)
    for name, path in zip(REWARD_MODELS, paths, strict=True):
        if path is None:
            continue
        size, _ = _read(path, config)
        role = reward_model(
            name,
            with_value_head(size),
            ds=config.ds,
            ranks=_ranks(reward),
            tokens=tokens,
            device=device,
            is_offloaded=reward.offload,
        )
        found.append((role, _ranks(reward)))
    return found


def largest_pack(config: RlConfig | SftConfig, reader: Processor, ranks: int) -> tuple[int, int]:
    """Tokens and vision patches of the largest pack that a rank may get: prompts full of images.

    The token budget bounds it, and what a rank has of an optimizer step; one sample is always taken.
    """
    answer = config.rollout.max_new_tokens if isinstance(config, RlConfig) else 0
    longest = config.data.max_len + answer
    samples = -(-config.train.batch_size // ranks)
    tokens = min(config.train.max_tokens_per_gpu, min(samples, config.train.micro_batch_size or samples) * longest)
    tokens = max(tokens, longest)
    dummy = reader.dummy_sample()
    if dummy is None:
        return tokens, 0
    (width, height), (_, rows, columns) = dummy.media[0].size, reader.grid(dummy.media[0].size)
    most = config.data.max_images_per_prompt * config.data.max_pixels * rows * columns / (width * height)
    of_prompt = min(most, config.data.max_len * rows * columns / reader.num_tokens((width, height)))
    answers = config.rollout.n_samples_per_prompt if isinstance(config, RlConfig) else 1
    if config.train.layout != "shared":
        answers = 1
    return tokens, int(tokens * of_prompt / (config.data.max_len + answers * answer))


def drawn(config: RlConfig | SftConfig, plan: MemoryPlan, machine: Machine) -> Table:
    """The plan, for people."""
    where = "main memory" if machine.device == "cpu" else "each GPU"
    table = Table(title=f"memory of vlmrl {config.verb}, GiB a process; {machine.device_bytes / GIB:.1f} in {where}")
    table.add_column("")
    for role, count in plan.roles:
        table.add_column(f"{role.name} x{count}", justify="right")
    names = dict.fromkeys(part.name for role, _ in plan.roles for part in role.parts)
    for name in names:
        table.add_row(name, *(_gib(_of(role, name)) for role, _ in plan.roles))
    table.add_section()
    together = (sum(part.num_bytes for part in role.parts) for role, _ in plan.roles)
    table.add_row("together", *map(_gib, together))
    return table


def _shares(config: RlConfig | SftConfig, roles: tuple[tuple[Role, int], ...], machine: Machine) -> list[Share]:
    every = tuple(role for role, _ in roles)
    if machine.device == "cpu":
        needed = sum(count * sum(part.num_bytes for part in role.parts) for role, count in roles)
        # Without a GPU there is no other memory: what would lie beside one counts like the rest.
        return [Share("main memory", needed, machine.host_bytes, tuple(_all_on_device(role) for role in every))]
    found = []
    for names in _neighbours(config):
        near = tuple(role for role in every if role.name in names)
        needs = {role.name: role.num_bytes() for role in near}
        needed = sum(needs.values())
        if isinstance(config, RlConfig) and config.vllm.enable_sleep and "vllm" in needs:
            # Engines sleep while others learn; those give back what their passes take, and keep what stays.
            others = [p for role in near if role.name != "vllm" for p in role.parts]
            kept = sum(p.num_bytes for p in others if p.stays and not p.in_host_memory)
            needed = max(needs["vllm"] + kept, needed - needs["vllm"])
        if near:
            found.append(Share(f"a GPU of {' and '.join(needs)}", needed, machine.device_bytes, near))
    beside = sum(count * role.num_bytes(on_device=False) for role, count in roles)
    return [*found, Share("main memory", beside, machine.host_bytes, every, on_device=False)]


def _neighbours(config: RlConfig | SftConfig) -> list[set[str]]:
    """Roles that have the same GPUs, and those that have their own."""
    pools = [set(pool) for pool in config.pools] if isinstance(config, RlConfig) else [{"actor"}]
    for pool in pools:
        if "actor" in pool and _is_with_actor(config):
            pool.add("critic")
    pooled = set().union(*pools)
    return [*pools, *({name} for name in ("critic", "ref", "vllm") if name not in pooled)]


def _is_with_actor(config: RlConfig | SftConfig) -> bool:
    return isinstance(config, RlConfig) and config.critic_is_with_actor


def _ranks(role: Model | Critic | Ref | Reward) -> int:
    return role.num_nodes * role.num_gpus_per_node


def _read(path: str, config: RlConfig | SftConfig) -> tuple[Sizes, Processor]:
    columns, trust_remote_code = config.data, config.actor.trust_remote_code
    reader = processor_of(path, columns, trust_remote_code=trust_remote_code)
    return sizes(skeleton(path, trust_remote_code=trust_remote_code), reader.parameter_group), reader


def _cache_bytes(config: RlConfig | SftConfig, model: Model, size: Sizes, adapter: AdapterPlan | None) -> float:
    """Of image features, when what makes them stays as it is."""
    if size.tower is None:
        return 0.0
    return 0.0 if vision_trains(model, adapter) else config.vision.cache_gib * GIB


def _with_process(role: Role, machine: Machine, *, has_imports: bool) -> Role:
    process = Part("process", _IMPORTS[role.name], "", in_host_memory=machine.device != "cpu")
    imports = (process,) if has_imports else ()
    if machine.device != "cpu":
        return Role(role.name, (*role.parts, *imports))
    hoarded = [
        Part("kept by malloc", _HOARDED * part.num_bytes, part.flag)
        for part in role.parts
        if part.name == "activations"
    ]
    return Role(role.name, (*role.parts, *hoarded, *imports))


def _all_on_device(role: Role) -> Role:
    return Role(role.name, tuple(Part(part.name, part.num_bytes, part.flag) for part in role.parts))


def _of(role: Role, name: str) -> float:
    return sum(part.num_bytes for part in role.parts if part.name == name)


def _gib(num_bytes: float) -> Any:
    return f"{num_bytes / GIB:.2f}" if num_bytes else ""
