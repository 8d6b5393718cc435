"""Checks before any role starts: settings, models, columns, machine, placement; with `--dry-run` also the data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmrl.algorithms import advantages, losses
from vlmrl.cluster.data import row_requirements
from vlmrl.cluster.placement import plan
from vlmrl.cluster.role_settings import source_settings
from vlmrl.cluster.roles import num_nodes_required, placement_table, plan_arguments
from vlmrl.cluster.session import Session, joins_cluster, local_session
from vlmrl.cluster.sync_plan import check_devices, check_engine_base
from vlmrl.commands import forecast
from vlmrl.commands.hardware import check_hardware
from vlmrl.commands.questions import questions_of
from vlmrl.config.data import Data
from vlmrl.config.stages import DpoConfig, SamplingConfig, SftConfig, SupervisedConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.data.columns import find_columns
from vlmrl.data.media import InlineMedia
from vlmrl.data.rows import Rows, load_all
from vlmrl.data.source import Source
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, plan_adapter
from vlmrl.models.expert_settings import check_experts
from vlmrl.models.kind import check_generates
from vlmrl.models.max_length import check_length, max_positions
from vlmrl.observe.trackers import check_trackers
from vlmrl.plugins import MODEL_FLAG, Processor, check_same_inputs, processor_of
from vlmrl.rewards.label_check import LabelCheck
from vlmrl.rewards.question_labels import label_questions
from vlmrl.system import machine
from vlmrl.system.plain_text import one_line, print_line
from vlmrl.system.user_function import name_or_function
from vlmrl.types import Media, Prompt, Sample

_NUM_SAMPLES = 100
"""Rows whose length with the response a dry run of `vlmrl sft` measures."""
_GENERATING = (
    "ref.model_name_or_path",
    "algo.distill.teacher_model_name_or_path",
    "sft.teacher_model_name_or_path",
)
"""Models other than the actor that have log-probs of text."""
_NUM_ROWS = 256
"""Rows that a dry run reads, with their images; a whole dataset may take an hour."""


def actor_adapter_plan(config: TrainingConfig, processor: Processor) -> AdapterPlan | None:
    """Plan the actor's adapter; None when the model itself trains.

    Raises:
        ConfigError: the model has no such layers, or they are frozen, or the engines do not support these settings.
    """
    check_experts(config.actor, config.ds, replays=isinstance(config, RlConfig) and config.algo.routing_replay)
    plan = plan_adapter(config.actor, config.ds.lora, processor)
    if isinstance(config, RlConfig) or (isinstance(config, SamplingConfig) and config.generation is not None):
        check_engine_base(plan, ds=config.ds, vllm=config.vllm)
    return plan


def critic_adapter_plan(config: RlConfig) -> AdapterPlan | None:
    """Plan the critic's adapter; None when the critic itself trains, or there is no critic.

    Raises:
        ConfigError: the critic has no such layers, or they are frozen.
    """
    if not config.has_critic or config.ds.lora.rank == 0:
        return None
    model = config.resolved_critic.as_model
    processor = processor_of(model.model_name_or_path, config.data, trust_remote_code=config.actor.trust_remote_code)
    return plan_adapter(model, config.ds.lora, processor)


def check_algorithm(config: RlConfig) -> None:
    """Load the user's own estimator and loss, if the settings name any, and check their parameters.

    Raises:
        ConfigError: a file does not exist, does not import or lacks the function, or the function requires parameters
            that vlmrl does not pass.
    """
    estimator = name_or_function(config.algo.advantage.estimator, advantages.FLAG)
    if callable(estimator):
        advantages.check(estimator, has_critic=config.has_critic)
    loss = name_or_function(config.actor.policy_loss_type, losses.FLAG)
    if callable(loss):
        losses.check(loss)


def check_models(config: RlConfig | EvalConfig) -> None:
    """Check the models other than the actor, and all their numbers of positions, from configurations and tokenizers.

    Raises:
        ConfigError: a model does not exist, cannot be read, or reads other tokens or images than the actor; or one
            has fewer positions than a prompt and its response may take.
    """
    reward = config.reward
    paths = {
        "reward.model_name_or_path": reward.model_name_or_path,
        "reward.process_model_name_or_path": reward.process_model_name_or_path,
    }
    if isinstance(config, RlConfig):
        paths |= {
            "critic.model_name_or_path": config.critic.model_name_or_path,
            "ref.model_name_or_path": config.ref.model_name_or_path,
            "algo.distill.teacher_model_name_or_path": config.algo.distill.teacher_model_name_or_path,
        }
    given = [(flag, path) for flag, path in paths.items() if path is not None]
    if given:
        _check_other_models(config, given)
    for path in (config.actor.model_name_or_path, *(path for _, path in given)):
        check_length(
            path,
            config.max_sequence_tokens,
            settings=config.settings_of_length,
            trust_remote_code=config.actor.trust_remote_code,
        )


def check_reference(config: DpoConfig) -> None:
    """Check the model of the reference, if it is another, as `check_models` does. Raises ConfigError."""
    if config.ref.model_name_or_path is not None:
        _check_other_models(config, [("ref.model_name_or_path", config.ref.model_name_or_path)])


def check_teacher(config: SftConfig) -> None:
    """Check the teacher of supervised training, if there is one, like other models. Raises ConfigError."""
    teacher = config.sft.teacher_model_name_or_path
    if teacher is not None:
        _check_other_models(config, [("sft.teacher_model_name_or_path", teacher)])
        check_length(
            teacher,
            config.data.max_len,
            settings="a prompt and its response (data.max_len)",
            trust_remote_code=config.actor.trust_remote_code,
        )


def check_sequence(config: TrainingConfig) -> None:
    """Check that the ranks of `ds.sequence_parallel_size` can share actor and critic. Raises ConfigError."""
    size, actor = config.ds.sequence_parallel_size, config.actor
    if size == 1:
        return
    from vlmrl.models.load import skeleton
    from vlmrl.models.sequence import check_divisible

    critic = config.critic.model_name_or_path if isinstance(config, RlConfig) and config.has_critic else None
    for flag, path in ((MODEL_FLAG, actor.model_name_or_path), ("critic.model_name_or_path", critic)):
        if path is not None:
            check_divisible(skeleton(path, trust_remote_code=actor.trust_remote_code, flag=flag), size)


def _check_other_models(config: TrainingConfig | EvalConfig, given: Sequence[tuple[str, str]]) -> None:
    """Check models other than the actor, each given as (setting, path)."""
    # Here: it imports torch, which takes seconds and needs `startup.prepare`.
    from vlmrl.models.load import skeleton

    actor = config.actor
    for flag, path in given:
        if flag in _GENERATING:
            check_generates(path, trust_remote_code=actor.trust_remote_code, flag=flag)
        skeleton(path, trust_remote_code=actor.trust_remote_code, flag=flag)
    load = partial(processor_of, columns=config.data, trust_remote_code=actor.trust_remote_code)
    actor_processor = load(actor.model_name_or_path)
    for flag, path in given:
        check_same_inputs(
            load(path, flag=flag), actor_processor, what=f"{flag}: {path}", actor=actor.model_name_or_path
        )


def check_columns(config: TrainingConfig | EvalConfig) -> None:
    """Find the columns of every dataset, and check labels, responses and images in a few rows.

    Raises:
        ConfigError, DataError: a dataset does not exist, lacks a column that the run needs, or has images that the
            settings would ignore.
    """
    data, requirements = config.data, row_requirements(config)
    sources: list[Rows] = []
    if isinstance(data, Data):
        seed = config.train.seed
        sources = load_all(data.prompt_dataset, split=data.prompt_split, max_samples=data.max_samples, seed=seed)
        for source in sources:
            find_columns(source, sources, data, requirements)
    if isinstance(config, RlConfig | EvalConfig) and config.eval.dataset is not None:
        held_out = config.eval
        sets = load_all(
            held_out.dataset or "", split=held_out.split, max_samples=held_out.max_samples, seed=config.train.seed
        )
        for source in sets:
            find_columns(source, [*sources, *sets], data, requirements)


def check_lengths(config: RlConfig | EvalConfig) -> None:
    """Raise ConfigError if a prompt and its response may exceed the model's positions: no engine would start."""
    check_length(
        config.actor.model_name_or_path,
        config.max_sequence_tokens,
        settings=config.settings_of_length,
        trust_remote_code=config.actor.trust_remote_code,
    )


def format_positions(config: SupervisedConfig) -> list[str]:
    """Warn in one line if rows may be longer than the model's positions; nothing otherwise."""
    limit = max_positions(config.actor.model_name_or_path, trust_remote_code=config.actor.trust_remote_code)
    if limit is None or config.data.max_len <= limit:
        return []
    line = (
        f"warning: data.max_len {config.data.max_len} is above the model's {limit} positions: rows of a length between "
        f"them are trained on, and the model may fail on them; set data.max_len {limit}"
    )
    return [line]


def check_machine(config: TrainingConfig | EvalConfig) -> list[str]:
    """Check this machine as `vlmrl doctor` does; return a warning for each resource that is scarce but sufficient.

    Raises:
        ClusterError: the machine lacks something essential.
        ConfigError: W&B is enabled and cannot be used, or machines are waited for that cannot join.
    """
    if config.train.wait_nodes_s and not joins_cluster():
        raise ConfigError(
            "train.wait_nodes_s waits for machines of a cluster, and RAY_ADDRESS names none: leave it out"
        )
    output = Path(config.ckpt.output_dir).expanduser()
    findings = machine.run_checks(output, joins_cluster=joins_cluster())
    if not isinstance(config, EvalConfig) and config.logger.tensorboard_dir is not None:
        finding = machine.disk(Path(config.logger.tensorboard_dir), flag="--logger.tensorboard_dir")
        findings.append(replace(finding, name="disk of TensorBoard"))
    if not isinstance(config, EvalConfig):
        check_trackers(config.logger)
    return machine.require(findings)


def format_checkpoint_plan(config: TrainingConfig | EvalConfig) -> list[str]:
    """Say how often the run writes checkpoints, in one line; nothing for a run that does not train."""
    if isinstance(config, EvalConfig):
        return []
    interval, folder = config.ckpt.save_steps, Path(config.ckpt.output_dir) / "checkpoints"
    if interval <= 0:
        return ["checkpoints: none, so a stopped run starts again at step 1; --ckpt.save_steps N writes them"]
    return [f"checkpoints: every {interval} steps to {folder}, the newest {config.ckpt.max_num} are kept"]


def check_data(
    config: TrainingConfig | EvalConfig, warnings: Sequence[str], adapter: AdapterPlan | None = None
) -> None:
    """Finish a dry run: check placement, reward functions, rows and images, and print the plan.

    `warnings` are of `check_machine`, and `adapter` is the actor's.

    Raises:
        VlmrlError: an error that would stop the run, as far as it can be detected without starting it.
    """
    console = Console()
    _place(config, adapter, console)
    if isinstance(config, EvalConfig):
        check_lengths(config)
    for line in (*format_checkpoint_plan(config), *warnings):
        print_line(console, line)
    # The source of the run, but endless: a dry run reads rows as prompts and again as samples.
    settings = replace(source_settings(config), epochs=None)
    with closing(LabelCheck(settings.functions)) as label_check:
        _show_data(config, settings.build(share=_keep, label_check=label_check), console)
    console.print("dry run: nothing was started and nothing written")


def _keep(media: InlineMedia) -> Media:
    """Leave the pixels in this process: nothing stores them for others."""
    return media


def _place(config: TrainingConfig | EvalConfig, adapter: AdapterPlan | None, console: Console) -> None:
    """Plan the placement on this machine; for several machines, on as many like this one."""
    machines, wanted = local_session(), num_nodes_required(config)
    if wanted > 1:
        machines = Session(tuple(replace(machines.nodes[0], id=str(number)) for number in range(wanted)))
        print_line(console, f"a dry run sees only this machine: planned for {wanted} machines like it")
    check_hardware(config, machines, adapter)
    try:
        places = plan(**plan_arguments(config, machines))
    except ClusterError as error:
        if not joins_cluster():
            raise
        unknown = "a dry run does not contact the cluster of RAY_ADDRESS"
        print_line(console, f"warning: placement: {error}; {unknown}")
        return
    if isinstance(config, RlConfig | SamplingConfig):
        check_devices(config.vllm, machines, places)
    console.print(placement_table(places, machines))


def _show_data(config: TrainingConfig | EvalConfig, source: Source, console: Console) -> None:
    """Read the first training rows and all evaluation rows, and print a summary."""
    if isinstance(config, RlConfig) and config.reward.functions:
        print_line(console, source.check_labels())
    if isinstance(config, DpoConfig) and not config.dpo.is_paired:
        source.check_classes()
    table = Table(title="data")
    for column in ("set", "rows", "read", "longest prompt", "images"):
        table.add_column(column)
    first: Prompt | None = None
    lines: list[str] = []
    if not isinstance(config, EvalConfig):
        lines += _training_lines(config, source)
        count = min(_NUM_ROWS, source.num_rows())
        prompts, _ = source.draw(count)
        first = prompts[0]
        lines.append(forecast.format_rows(source.num_rows(), source.dropped(), prompts, max_len=config.data.max_len))
        if isinstance(config, SupervisedConfig):
            samples = _draw_samples(config, source, min(_NUM_SAMPLES, source.num_rows()))
            model = config.actor
            num_positions = max_positions(model.model_name_or_path, trust_remote_code=model.trust_remote_code)
            lines += forecast.format_samples(samples, num_positions, source.processor)
        table.add_row("training", str(source.num_rows()), str(count), *_size_cells(prompts))
    for name, prompts in source.evaluation().items():
        first = first or prompts[0]
        count = len(prompts)
        table.add_row(Text(one_line(f"evaluation: {name}")), str(count), str(count), *_size_cells(prompts))
        if isinstance(config, SamplingConfig) and config.generation is not None:
            label_questions(name, questions_of(config, prompts), config.reward, lines.append)
    console.print(table)
    repeats = [] if isinstance(config, EvalConfig) else source.find_duplicates().lines()
    for line in (*repeats, *source.take_warnings()):
        print_line(console, line)
    assert first is not None, "a run has training rows or evaluation rows"
    label = "" if isinstance(config, SupervisedConfig) else f" -> {first.label!r}"
    print_line(console, f"first prompt ({first.source}): {first.text!r}{label}")
    if isinstance(config, RlConfig | EvalConfig):
        lines += forecast.format_rewards(config, first)
    for line in lines:
        print_line(console, line)


def _draw_samples(config: SupervisedConfig, source: Source, count: int) -> list[Sample]:
    requirements = row_requirements(config)
    if requirements.pair:
        return source.draw_pairs(count)[0].samples
    if requirements.step_separator is not None:
        return source.draw_steps(count)[0].samples
    return source.draw_samples(count)[0]


def _training_lines(config: TrainingConfig, source: Source) -> list[str]:
    """Lines on steps, trained parts and memory of a training run."""
    lines = [forecast.format_steps(config, source.num_rows()), forecast.format_trained_parts(config, source.processor)]
    # The memory of other machines is unknown.
    return lines + (forecast.format_memory(config) if num_nodes_required(config) == 1 else [])


def _size_cells(prompts: Sequence[Prompt]) -> tuple[str, str]:
    return f"{max(len(p.tokens) for p in prompts)} tokens", str(sum(len(p.media) for p in prompts))
