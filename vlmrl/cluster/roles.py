"""Roles of a run with their numbers of workers, and the placement as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vlmrl.cluster.placement import Place, Role
from vlmrl.cluster.session import Session
from vlmrl.config.actor import Model, Ref
from vlmrl.config.critic import Critic
from vlmrl.config.distill import Distill
from vlmrl.config.reward import Reward
from vlmrl.config.roles import REWARD_MODELS
from vlmrl.config.stages import DpoConfig, SamplingConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig


def plan_arguments(config: TrainingConfig | EvalConfig, machines: Session) -> dict[str, Any]:
    """Arguments of `placement.plan` for this run."""
    roles: list[Role] = []
    if not isinstance(config, EvalConfig):
        roles.append(_on_ranks("actor", config.actor))
    if isinstance(config, RlConfig) and config.has_critic and not config.critic_is_with_actor:
        roles.append(_on_ranks("critic", config.critic))
    if isinstance(config, RlConfig | DpoConfig) and config.has_reference:
        roles.append(_on_ranks("ref", config.ref))
    if isinstance(config, RlConfig) and config.has_teacher:
        roles.append(_on_ranks("teacher", config.algo.distill, section="algo.distill"))
    if isinstance(config, RlConfig | EvalConfig):
        paths = (config.reward.model_name_or_path, config.reward.process_model_name_or_path)
        roles += [
            _on_ranks(name, config.reward, section="reward")
            for name, path in zip(REWARD_MODELS, paths, strict=True)
            if path is not None
        ]
    sampling = config.generation if isinstance(config, SamplingConfig) else config
    if isinstance(sampling, RlConfig | EvalConfig):
        vllm = sampling.vllm
        roles.append(Role("vllm", vllm.num_engines, vllm.gpus_per_engine, flag="--vllm.num_engines"))
    shared = config.pools
    arguments: dict[str, Any] = {"roles": roles, "shared": shared, "available": machines.slots, "unit": machines.unit}
    if isinstance(config, RlConfig) and config.train.queue_size:
        arguments["sharing"] = _sharing_of_async(config)
    elif not isinstance(config, RlConfig) and (sampling is None or sampling is config):
        arguments["sharing"] = []
    return arguments


def _sharing_of_async(config: RlConfig) -> list[str]:
    """Settings by which more roles of the trainer would share devices: the engines of an asynchronous run have their
    own."""
    train = config.train
    helps = {
        "--train.colocate_actor_critic": config.has_critic and not train.colocate_actor_critic,
        "--train.colocate_actor_ref": config.has_reference and not train.colocate_actor_ref,
        "--train.colocate_actor_teacher": config.has_teacher and not train.colocate_actor_teacher,
        "--train.colocate_critic_reward": config.has_critic
        and config.reward.has_model
        and not train.colocate_critic_reward,
    }
    return [flag for flag, does_help in helps.items() if does_help]


def _on_ranks(name: str, ranks: Model | Critic | Ref | Distill | Reward, *, section: str = "") -> Role:
    """Return a role with one worker per rank. `section` names its settings, if not as the role."""
    per_node = ranks.num_gpus_per_node
    flag = f"--{section or name}.num_gpus_per_node"
    return Role(name, ranks.num_nodes * per_node, 1, flag=flag, workers_per_node=per_node)


def num_nodes_required(config: TrainingConfig | EvalConfig) -> int:
    """Return the number of machines that the largest role requires."""
    if isinstance(config, EvalConfig):
        return config.reward.num_nodes
    roles: list[Model | Critic | Ref | Distill | Reward] = [config.actor]
    if isinstance(config, RlConfig):
        roles += [config.critic, config.ref, config.algo.distill, config.reward]
    if isinstance(config, DpoConfig):
        roles.append(config.ref)
    return max(role.num_nodes for role in roles)


def placement_table(places: Mapping[str, Sequence[Place]], machines: Session) -> Table:
    """Return the placement as a table for users."""
    table = Table(title="placement")
    for column in ("role", "workers", f"{machines.unit}s, node:number, of {sum(machines.slots)}"):
        table.add_column(column)
    for row in placement_rows(places, machines):
        table.add_row(*row)
    return table


def placement_rows(places: Mapping[str, Sequence[Place]], machines: Session) -> list[tuple[str, str, str]]:
    """Return role, number of workers, and where they are, of each role."""
    return [
        (role, str(len(workers)), " ".join(f"{p.node}:{_slots(p, machines)}" for p in workers))
        for role, workers in places.items()
    ]


def _slots(place: Place, machines: Session) -> str:
    """Return the slots of a worker by their names on its node; long ids of GPUs are cut."""
    node = machines.nodes[place.node]
    return "+".join(node.gpu(slot)[:12] if machines.has_gpus else str(slot) for slot in place.slots)
