"""What can be known before an engine starts: who runs where, and whether the data can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vlmrl.cluster.device_path import check_devices
from vlmrl.cluster.placement import Place, Role, plan
from vlmrl.cluster.publish import check_publication
from vlmrl.cluster.session import Session, local_session
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.data.source import Source
from vlmrl.models.adapter_plan import AdapterPlan, plan_adapter
from vlmrl.plugins import Processor

_ROWS_LOOKED_AT = 256
"""A dry run reads so many rows and their images; a whole dataset would take as long as the run's first hour."""


def roles_of(config: RlConfig | SftConfig | EvalConfig, machines: Session) -> dict[str, Any]:
    """The arguments of `placement.plan` for this run."""
    roles: list[Role] = []
    shared: list[frozenset[str]] = []
    if not isinstance(config, EvalConfig):
        roles.append(_trained("actor", config.actor.num_nodes, config.actor.num_gpus_per_node))
    if isinstance(config, RlConfig) and config.has_reference:
        roles.append(_trained("ref", config.ref.num_nodes, config.ref.num_gpus_per_node))
    if not isinstance(config, SftConfig):
        roles.append(Role("vllm", config.vllm.num_engines, config.vllm.tensor_parallel_size, flag="--vllm.num_engines"))
    if isinstance(config, RlConfig):
        if config.train.colocate_all:
            shared.append(frozenset({"actor", "ref", "vllm"}))
        elif config.train.colocate_actor_ref:
            shared.append(frozenset({"actor", "ref"}))
    return {"roles": roles, "shared": shared, "available": machines.slots, "unit": machines.unit}


def plan_of(config: RlConfig | SftConfig, tools: Processor) -> AdapterPlan | None:
    """The adapter that the settings ask for; None when the model itself trains.

    Raises:
        ConfigError: the model has no such layers, or they are frozen, or the engines cannot take what the settings say.
    """
    plan = plan_adapter(config.actor, config.ds.lora, tools)
    if isinstance(config, RlConfig):
        check_publication(plan, ds=config.ds, vllm=config.vllm)
    return plan


def _trained(name: str, num_nodes: int, per_node: int) -> Role:
    return Role(name, num_nodes * per_node, 1, flag=f"--{name}.num_gpus_per_node", workers_per_node=per_node)


def describe(places: Mapping[str, Sequence[Place]], machines: Session) -> Table:
    """The placement, for people."""
    table = Table(title="placement")
    for column in ("role", "workers", f"{machines.unit}s, node:number, of {sum(machines.slots)}"):
        table.add_column(column)
    for role, workers in places.items():
        slots = " ".join(f"{place.node}:{'+'.join(map(str, place.slots))}" for place in workers)
        table.add_row(role, str(len(workers)), slots)
    return table


def check_data(config: RlConfig | SftConfig | EvalConfig) -> None:
    """The rest of a dry run: placement on this machine, reward functions, rows and images; prints the plan.

    Raises:
        VlmrlError: whatever the run itself would stop with, as far as it can be known.
    """
    console = Console()
    machines = local_session()
    places = plan(**roles_of(config, machines))
    if isinstance(config, RlConfig):
        check_devices(config.vllm, machines, places)
    console.print(describe(places, machines))
    source = Source(
        model=config.actor.model_name_or_path,
        trust_remote_code=config.actor.trust_remote_code,
        data=config.data,
        evaluation=getattr(config, "eval", None),
        seed=config.train.seed,
    )
    table = Table(title="data")
    for column in ("set", "rows", "looked at", "longest prompt", "images"):
        table.add_column(column)
    if not isinstance(config, EvalConfig):
        count = min(_ROWS_LOOKED_AT, source.num_rows())
        prompts, _ = source.draw(count)
        if isinstance(config, SftConfig):
            source.draw_samples(1)
        table.add_row("training", str(source.num_rows()), str(count), *_extent(prompts))
        first = f"first prompt ({prompts[0].source}): {prompts[0].text!r} -> {prompts[0].label!r}"
        console.print(first, markup=False, highlight=False, soft_wrap=True)
    for name, prompts in source.evaluation().items():
        table.add_row(f"evaluation: {name}", str(len(prompts)), str(len(prompts)), *_extent(prompts))
    console.print(table)
    for line in source.take_notes():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print("dry run: nothing was started and nothing written")


def _extent(prompts: Sequence[Any]) -> tuple[str, str]:
    return f"{max(len(p.tokens) for p in prompts)} tokens", str(sum(len(p.media) for p in prompts))
