"""What can be known before an engine starts: who runs where, and whether the data can be used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmrl.algorithms import advantages, losses
from vlmrl.cluster.data import row_requirements
from vlmrl.cluster.placement import plan
from vlmrl.cluster.roles import describe, nodes_wanted, roles_of
from vlmrl.cluster.session import Session, joins_cluster, local_session
from vlmrl.cluster.sync_plan import check_devices, check_engine_base
from vlmrl.commands import forecast
from vlmrl.config.data import Data
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.data.columns import find_columns
from vlmrl.data.rows import Rows, load_all
from vlmrl.data.source import Source
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, check_engine_dtype, plan_adapter
from vlmrl.models.positions import check_length, positions
from vlmrl.observe.sinks import usable_wandb
from vlmrl.plugins import Processor, check_reads_alike, processor_of
from vlmrl.rewards.label_check import LabelCheck
from vlmrl.system import machine
from vlmrl.system.plain_text import one_line, print_line
from vlmrl.system.user_function import name_or_function
from vlmrl.types import Prompt

_SAMPLES_LOOKED_AT = 100
"""Rows with their responses whose length a dry run of `vlmrl sft` measures."""
_ROWS_LOOKED_AT = 256
"""A dry run reads so many rows and their images; a whole dataset would take as long as the run's first hour."""


def plan_of(config: RlConfig | SftConfig, tools: Processor) -> AdapterPlan | None:
    """The adapter that the settings ask for; None when the model itself trains.

    Raises:
        ConfigError: the model has no such layers, or they are frozen, or the engines cannot take what the settings say.
    """
    plan = plan_adapter(config.actor, config.ds.lora, tools)
    if isinstance(config, RlConfig):
        check_engine_base(plan, ds=config.ds, vllm=config.vllm)
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
    if callable(estimator):
        advantages.check(estimator, has_critic=config.has_critic)
    loss = name_or_function(config.actor.policy_loss_type, losses.FLAG)
    if callable(loss):
        losses.check(loss)


def check_models(config: RlConfig) -> None:
    """Look for the models beside the actor, and for the actor's positions: reads configurations and tokenizers, no
    weights.

    Raises:
        ConfigError: one of them is not there, is no model, or reads other tokens or images than the actor; or the
            actor has fewer positions than a prompt and its response may take.
    """
    reward = config.reward
    paths = {
        "critic.model_name_or_path": config.critic.model_name_or_path,
        "ref.model_name_or_path": config.ref.model_name_or_path,
        "reward.model_name_or_path": reward.model_name_or_path,
        "reward.process_model_name_or_path": reward.process_model_name_or_path,
    }
    given = [(flag, path) for flag, path in paths.items() if path is not None]
    if given:
        _check_beside(config, given)
    check_lengths(config)


def _check_beside(config: RlConfig, given: Sequence[tuple[str, str]]) -> None:
    """`given` are the models beside the actor: (setting, path)."""
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


def check_columns(config: RlConfig | SftConfig | EvalConfig) -> None:
    """Look for the columns of every dataset, and for labels, answers and images in a few rows.

    Raises:
        ConfigError, DataError: a dataset is not there, or lacks what the run needs, or has images that it would not
            read.
    """
    data, requirements = config.data, row_requirements(config)
    sources: list[Rows] = []
    if isinstance(data, Data):
        seed = config.train.seed
        sources = load_all(data.prompt_dataset, split=data.prompt_split, max_samples=data.max_samples, seed=seed)
        for source in sources:
            find_columns(source, sources, data, requirements)
    if not isinstance(config, SftConfig) and config.eval.dataset is not None:
        held = config.eval
        sets = load_all(held.dataset or "", split=held.split, max_samples=held.max_samples, seed=config.train.seed)
        for source in sets:
            find_columns(source, [*sources, *sets], data, requirements)


def check_lengths(config: RlConfig | EvalConfig) -> None:
    """Raises ConfigError when a prompt and its response may be longer than the model's positions: no engine would
    start."""
    check_length(
        config.actor.model_name_or_path,
        config.data.max_len + config.rollout.max_new_tokens,
        said=f"data.max_len {config.data.max_len} and rollout.max_new_tokens {config.rollout.max_new_tokens}",
        trust_remote_code=config.actor.trust_remote_code,
    )


def check_machine(config: RlConfig | SftConfig | EvalConfig) -> list[str]:
    """Ask what `vlmrl doctor` asks of this machine, for this run; one line for whatever is short but will do.

    Raises:
        ClusterError: something is lacking without which nothing runs.
        ConfigError: W&B is asked for and cannot be used.
    """
    output = Path(config.ckpt.output_dir).expanduser()
    findings = machine.examine(output, joins=joins_cluster())
    if not isinstance(config, EvalConfig) and config.logger.tensorboard_dir is not None:
        found = machine.disk(Path(config.logger.tensorboard_dir), flag="--logger.tensorboard_dir")
        findings.append(replace(found, name="disk of TensorBoard"))
    if not isinstance(config, EvalConfig) and config.logger.wandb.project is not None:
        usable_wandb()
    return machine.require(findings)


def checkpoints_planned(config: RlConfig | SftConfig | EvalConfig) -> list[str]:
    """A line for people: how often the run can be continued from, if at all. None for a run that learns nothing."""
    if isinstance(config, EvalConfig):
        return []
    every, folder = config.ckpt.save_steps, Path(config.ckpt.output_dir) / "checkpoints"
    if every <= 0:
        return ["checkpoints: none, so that a run that stops begins again at step 1; --ckpt.save_steps N writes them"]
    return [f"checkpoints: every {every} steps to {folder}, of which the newest {config.ckpt.max_num} stay"]


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


def check_data(config: RlConfig | SftConfig | EvalConfig, adapter: AdapterPlan | None = None) -> None:
    """The rest of a dry run: placement on this machine, reward functions, rows and images; prints the plan.

    `adapter` is `plan_of` the settings.

    Raises:
        VlmrlError: whatever the run itself would stop with, as far as it can be known.
    """
    console = Console()
    _place(config, adapter, console)
    if isinstance(config, EvalConfig):
        check_lengths(config)
    for line in (*checkpoints_planned(config), *check_machine(config)):
        print_line(console, line)
    functions = () if isinstance(config, SftConfig) else tuple(config.reward.functions)
    with closing(LabelCheck(functions)) as label_problems:
        source = Source(
            model=config.actor.model_name_or_path,
            trust_remote_code=config.actor.trust_remote_code,
            data=config.data,
            evaluation=getattr(config, "eval", None),
            seed=config.train.seed,
            label_problems=label_problems,
            requirements=row_requirements(config),
        )
        _look_at(config, source, console)
    console.print("dry run: nothing was started and nothing written")


def _place(config: RlConfig | SftConfig | EvalConfig, adapter: AdapterPlan | None, console: Console) -> None:
    """Plan the placement on this machine, and where several are asked for, on as many like it: it alone is known."""
    machines, wanted = local_session(), nodes_wanted(config)
    if wanted > 1:
        machines = Session(tuple(replace(machines.nodes[0], id=str(number)) for number in range(wanted)))
        print_line(console, f"a dry run sees this machine alone: planned for {wanted} machines like it")
    check_hardware(config, machines, adapter)
    try:
        places = plan(**roles_of(config, machines))
    except ClusterError as error:
        if not joins_cluster():
            raise
        unknown = "the cluster that RAY_ADDRESS names is not asked by a dry run"
        print_line(console, f"warning: placement: {error}; {unknown}")
        return
    if isinstance(config, RlConfig):
        check_devices(config.vllm, machines, places)
    console.print(describe(places, machines))


def _look_at(config: RlConfig | SftConfig | EvalConfig, source: Source, console: Console) -> None:
    """Read the first training rows and all evaluation rows, and print what they are like."""
    if isinstance(config, RlConfig) and config.reward.functions:
        print_line(console, source.check_labels())
    table = Table(title="data")
    for column in ("set", "rows", "looked at", "longest prompt", "images"):
        table.add_column(column)
    first: Prompt | None = None
    lines: list[str] = []
    if not isinstance(config, EvalConfig):
        lines += _training_lines(config, source)
        count = min(_ROWS_LOOKED_AT, source.num_rows())
        prompts, _ = source.draw(count)
        first = prompts[0]
        lines.append(forecast.of_rows(source.num_rows(), source.dropped(), prompts, max_len=config.data.max_len))
        if isinstance(config, SftConfig):
            samples, _ = source.draw_samples(min(_SAMPLES_LOOKED_AT, source.num_rows()))
            model = config.actor
            known = positions(model.model_name_or_path, trust_remote_code=model.trust_remote_code)
            lines += forecast.of_samples(samples, known)
        table.add_row("training", str(source.num_rows()), str(count), *_extent(prompts))
    for name, prompts in source.evaluation().items():
        first = first or prompts[0]
        table.add_row(Text(one_line(f"evaluation: {name}")), str(len(prompts)), str(len(prompts)), *_extent(prompts))
    console.print(table)
    repeats = [] if isinstance(config, EvalConfig) else source.find_duplicates().lines()
    for line in (*repeats, *source.take_warnings()):
        print_line(console, line)
    assert first is not None, "a run has training rows or evaluation rows"
    print_line(console, f"first prompt ({first.source}): {first.text!r} -> {first.label!r}")
    if not isinstance(config, SftConfig):
        lines += forecast.of_rewards(config, first)
    for line in lines:
        print_line(console, line)


def _training_lines(config: RlConfig | SftConfig, source: Source) -> list[str]:
    """What is known of a training run before its rows are read."""
    lines = [forecast.of_steps(config, source.num_rows()), forecast.of_training(config, source.processor)]
    # Of other machines than this one nobody knows the memory.
    return lines + (forecast.of_memory(config) if nodes_wanted(config) == 1 else [])


def _extent(prompts: Sequence[Any]) -> tuple[str, str]:
    return f"{max(len(p.tokens) for p in prompts)} tokens", str(sum(len(p.media) for p in prompts))
