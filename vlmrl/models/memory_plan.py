"""`vlmrl doctor --config run.yaml`: what the roles of a run take of memory, and whether this machine has it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vlmrl.config.data import Columns
from vlmrl.config.run import RlConfig, SftConfig
from vlmrl.doctor import free_memory
from vlmrl.errors import ClusterError
from vlmrl.models.adapter_plan import AdapterPlan, plan_adapter, vision_trains
from vlmrl.models.footprint import Part, Role, Sizes, engine, reference, sequence_bytes, sizes, trainer
from vlmrl.models.load import skeleton
from vlmrl.plugins import Processor, processor_of

GIB = 2**30
_IMPORTS = {"actor": 0.55 * GIB, "ref": 0.55 * GIB, "vllm": 1.3 * GIB}
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
    size, reader = _read(config.actor.model_name_or_path, config.actor.trust_remote_code, config.data)
    adapter = plan_adapter(config.actor, config.ds.lora, reader)
    ranks = config.actor.num_nodes * config.actor.num_gpus_per_node
    tokens, patches = largest_pack(config, reader, ranks)
    roles = [
        (
            trainer(
                size,
                model=config.actor,
                ds=config.ds,
                adapter=adapter,
                ranks=ranks,
                tokens=tokens,
                patches=patches,
                device=machine.device,
                cache_bytes=_cache_bytes(config, size, adapter),
            ),
            ranks,
        )
    ]
    sequence = 0.0
    if isinstance(config, RlConfig):
        longest = config.data.max_len + config.rollout.max_new_tokens
        sequence = sequence_bytes(size, vllm=config.vllm, ds=config.ds, tokens=longest)
        if config.has_reference:
            path = config.ref.model_name_or_path or config.actor.model_name_or_path
            other, _ = _read(path, config.actor.trust_remote_code, config.data)
            without_gradient = max(tokens, config.rollout.max_tokens_per_gpu or 0)
            held = reference(other, ds=config.ds, tokens=without_gradient, device=machine.device)
            roles.append((held, config.ref.num_nodes * config.ref.num_gpus_per_node))
        serving = engine(
            size,
            vllm=config.vllm,
            ds=config.ds,
            adapter=adapter,
            device=machine.device,
            device_bytes=machine.device_bytes,
        )
        roles.append((serving, config.vllm.num_engines * config.vllm.tensor_parallel_size))
    whole = tuple((_with_process(role, machine), count) for role, count in roles)
    return MemoryPlan(whole, tuple(_shares(config, whole, machine)), sequence)


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
            # They take turns.
            needed = max(needs["vllm"], needed - needs["vllm"])
        if near:
            found.append(Share(f"a GPU of {' and '.join(needs)}", needed, machine.device_bytes, near))
    beside = sum(count * role.num_bytes(on_device=False) for role, count in roles)
    return [*found, Share("main memory", beside, machine.host_bytes, every, on_device=False)]


def _neighbours(config: RlConfig | SftConfig) -> list[set[str]]:
    """Roles that have the same GPUs."""
    if isinstance(config, RlConfig) and config.train.colocate_all:
        return [{"actor", "ref", "vllm"}]
    if isinstance(config, RlConfig) and config.train.colocate_actor_ref:
        return [{"actor", "ref"}, {"vllm"}]
    return [{"actor"}, {"ref"}, {"vllm"}]


def _read(path: str, trust_remote_code: bool, columns: Columns) -> tuple[Sizes, Processor]:
    reader = processor_of(path, columns, trust_remote_code=trust_remote_code)
    return sizes(skeleton(path, trust_remote_code=trust_remote_code), reader.parameter_group), reader


def _cache_bytes(config: RlConfig | SftConfig, size: Sizes, adapter: AdapterPlan | None) -> float:
    """Of image features, when what makes them stays as it is."""
    if size.tower is None:
        return 0.0
    return 0.0 if vision_trains(config.actor, adapter) else config.vision.cache_gib * GIB


def _with_process(role: Role, machine: Machine) -> Role:
    imports = Part("process", _IMPORTS[role.name], "", in_host_memory=machine.device != "cpu")
    if machine.device != "cpu":
        return Role(role.name, (*role.parts, imports))
    hoarded = [
        Part("kept by malloc", _HOARDED * part.num_bytes, part.flag)
        for part in role.parts
        if part.name == "activations"
    ]
    return Role(role.name, (*role.parts, *hoarded, imports))


def _all_on_device(role: Role) -> Role:
    return Role(role.name, tuple(Part(part.name, part.num_bytes, part.flag) for part in role.parts))


def _of(role: Role, name: str) -> float:
    return sum(part.num_bytes for part in role.parts if part.name == name)


def _gib(num_bytes: float) -> Any:
    return f"{num_bytes / GIB:.2f}" if num_bytes else ""
