"""What can be known before an engine starts: who runs where, and whether the data can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vlmrl import machine
from vlmrl.algorithms import advantages, losses
from vlmrl.cluster.device_path import check_devices
from vlmrl.cluster.placement import Place, Role, plan
from vlmrl.cluster.publish import check_publication
from vlmrl.cluster.session import Session, joins_cluster, local_session
from vlmrl.config.actor import Model, Ref
from vlmrl.config.critic import Critic
from vlmrl.config.reward import Reward
from vlmrl.config.role_checks import REWARD_MODELS
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.data.source import Source
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, check_engine_dtype, plan_adapter
from vlmrl.plugins import Processor, check_reads_alike, name_or_function, processor_of
from vlmrl.rewards.label_check import LabelCheck
from vlmrl.role_settings import check_steps

_ROWS_LOOKED_AT = 256
"""A dry run reads so many rows and their images; a whole dataset would take as long as the run's first hour."""


def roles_of(config: RlConfig | SftConfig | EvalConfig, machines: Session) -> dict[str, Any]:
    """The arguments of `placement.plan` for this run."""
    roles: list[Role] = []
    if not isinstance(config, EvalConfig):
        roles.append(_on_ranks("actor", config.actor))
    if isinstance(config, RlConfig):
        if config.has_critic and not config.critic_is_with_actor:
            roles.append(_on_ranks("critic", config.critic))
        if config.has_reference:
            roles.append(_on_ranks("ref", config.ref))
        paths = (config.reward.model_name_or_path, config.reward.process_model_name_or_path)
        roles += [
            _on_ranks(name, config.reward, section="reward")
            for name, path in zip(REWARD_MODELS, paths, strict=True)
            if path is not None
        ]
    if not isinstance(config, SftConfig):
        roles.append(Role("vllm", config.vllm.num_engines, config.vllm.tensor_parallel_size, flag="--vllm.num_engines"))
    shared = config.pools if isinstance(config, RlConfig) else []
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


def plan_of_critic(config: RlConfig) -> AdapterPlan | None:
    """The critic's adapter; None when the critic itself trains, and when there is none.

    Raises:
        ConfigError: the critic has no such layers, or they are frozen.
    """
    if not config.has_critic or config.ds.lora.rank == 0:
        return None
    model = config.whole_critic.as_model
    reader = processor_of(model.model_name_or_path, config.data, trust_remote_code=config.actor.trust_remote_code)
    return plan_adapter(model, config.ds.lora, reader)


def check_algorithm(config: RlConfig) -> None:
    """Find the user's own estimator and loss, if the settings name any, and whether they can be called as we call them.

    Raises:
        ConfigError: a file is not there, does not import, lacks the function, or this asks for what nobody gives it.
    """
    estimator = name_or_function(config.algo.advantage.estimator, advantages.FLAG)
    advantages.check(estimator, has_critic=config.has_critic)
    losses.check(name_or_function(config.actor.policy_loss_type, losses.FLAG))


def check_models(config: RlConfig) -> None:
    """Look for the models beside the actor: reads their configurations and tokenizers, no weights.

    Raises:
        ConfigError: one of them is not there, is no model, or reads other tokens or images than the actor.
    """
    reward = config.reward
    paths = {
        "critic.model_name_or_path": config.critic.model_name_or_path,
        "ref.model_name_or_path": config.ref.model_name_or_path,
        "reward.model_name_or_path": reward.model_name_or_path,
        "reward.process_model_name_or_path": reward.process_model_name_or_path,
    }
    given = [(flag, path) for flag, path in paths.items() if path is not None]
    if not given:
        return
    # It needs what `startup.prepare` makes ready, and takes seconds to import.
    from vlmrl.models.load import skeleton

    actor = config.actor
    for flag, path in given:
        skeleton(path, trust_remote_code=actor.trust_remote_code, flag=flag)
    read = partial(processor_of, columns=config.data, trust_remote_code=actor.trust_remote_code)
    actors = read(actor.model_name_or_path)
    for flag, path in given:
        reader = read(path, flag=flag)
        check_reads_alike(reader, actors, what=f"{flag}: {path}", actor=actor.model_name_or_path)


def check_machine(config: RlConfig | SftConfig | EvalConfig) -> list[str]:
    """Ask what `vlmrl doctor` asks of this machine, for this run; one line for whatever is short but will do.

    Raises:
        ClusterError: something is lacking without which nothing runs.
    """
    output = Path(config.ckpt.output_dir).expanduser()
    return machine.require(machine.examine(output, joins=joins_cluster()))


def check_hardware(
    config: RlConfig | SftConfig | EvalConfig, machines: Session, adapter: AdapterPlan | None = None
) -> None:
    """Raises ConfigError for what the machines do not have, or cannot do with the run's adapter."""
    if machines.has_gpus:
        if isinstance(config, RlConfig):
            check_engine_dtype(adapter, config.ds.param_dtype, has_gpu=True)
        return
    if not isinstance(config, SftConfig) and config.vllm.enable_sleep:
        raise ConfigError("vllm.enable_sleep frees GPU memory, and there is no GPU here: leave it out")
    if isinstance(config, RlConfig) and config.ds.enable_sleep:
        raise ConfigError("ds.enable_sleep frees GPU memory, and there is no GPU here: leave it out")
    optimizers = {} if isinstance(config, EvalConfig) else {"actor": config.actor.optim}
    if isinstance(config, RlConfig) and config.has_critic:
        optimizers["critic"] = config.critic.optim
    for role, optim in optimizers.items():
        if optim not in ("adam", "muon"):
            raise ConfigError(f"{role}.optim {optim} is one of bitsandbytes', which needs CUDA: use adam")


def _on_ranks(name: str, ranks: Model | Critic | Ref | Reward, *, section: str = "") -> Role:
    """A role of one worker per rank; `section` is that of its settings, when it is not called like the role."""
    per_node = ranks.num_gpus_per_node
    flag = f"--{section or name}.num_gpus_per_node"
    return Role(name, ranks.num_nodes * per_node, 1, flag=flag, workers_per_node=per_node)


def describe(places: Mapping[str, Sequence[Place]], machines: Session) -> Table:
    """The placement, for people."""
    table = Table(title="placement")
    for column in ("role", "workers", f"{machines.unit}s, node:number, of {sum(machines.slots)}"):
        table.add_column(column)
    for role, workers in places.items():
        table.add_row(role, str(len(workers)), " ".join(f"{p.node}:{_slots(p, machines)}" for p in workers))
    return table


def _slots(place: Place, machines: Session) -> str:
    """The slots of a worker as its node knows them; of a GPU's long id the beginning."""
    node = machines.nodes[place.node]
    return "+".join(node.gpu(slot)[:12] if machines.has_gpus else str(slot) for slot in place.slots)


def check_data(config: RlConfig | SftConfig | EvalConfig, adapter: AdapterPlan | None = None) -> None:
    """The rest of a dry run: placement on this machine, reward functions, rows and images; prints the plan.

    `adapter` is `plan_of` the settings.

    Raises:
        VlmrlError: whatever the run itself would stop with, as far as it can be known.
    """
    console = Console()
    machines = local_session()
    check_hardware(config, machines, adapter)
    places = plan(**roles_of(config, machines))
    if isinstance(config, RlConfig):
        check_devices(config.vllm, machines, places)
    console.print(describe(places, machines))
    for line in check_machine(config):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    functions = () if isinstance(config, SftConfig) else tuple(config.reward.functions)
    with closing(LabelCheck(functions)) as label_problems:
        source = Source(
            model=config.actor.model_name_or_path,
            trust_remote_code=config.actor.trust_remote_code,
            data=config.data,
            evaluation=getattr(config, "eval", None),
            seed=config.train.seed,
            label_problems=label_problems,
        )
        _look_at(config, source, console)
    console.print("dry run: nothing was started and nothing written")


def _look_at(config: RlConfig | SftConfig | EvalConfig, source: Source, console: Console) -> None:
    """Read the first training rows and all evaluation rows, and print what they are like."""
    if isinstance(config, RlConfig) and config.reward.functions:
        console.print(str(source.look_at_labels()), markup=False, highlight=False, soft_wrap=True)
    table = Table(title="data")
    for column in ("set", "rows", "looked at", "longest prompt", "images"):
        table.add_column(column)
    if not isinstance(config, EvalConfig):
        check_steps(config, source.num_rows())
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


def _extent(prompts: Sequence[Any]) -> tuple[str, str]:
    return f"{max(len(p.tokens) for p in prompts)} tokens", str(sum(len(p.media) for p in prompts))
