"""`vlmrl plan`: estimate memory and step time of an RL run on GPUs, and find a placement that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from vlmrl.cluster.session import Node, Session
from vlmrl.commands.hardware import check_hardware
from vlmrl.commands.memory import GIB, Machine, memory_plan, memory_table, this_machine
from vlmrl.commands.plan_estimates import Planner, cache_bytes
from vlmrl.commands.preflight import actor_adapter_plan
from vlmrl.config.load import load
from vlmrl.config.names import setting_value
from vlmrl.config.plan import PlanConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.configured import ConfiguredModels
from vlmrl.observe.sinks import read_metrics
from vlmrl.plan.fit import Measured, fitted
from vlmrl.plan.known import model_folder
from vlmrl.plan.measured import measured_run
from vlmrl.plan.picture import draw
from vlmrl.plan.placements import Cluster, Found, Settings
from vlmrl.plan.planner import costs_of, image_sizes, nested, workload_of
from vlmrl.plan.rates import CPU, Rates, gpu_of, rates_of
from vlmrl.plan.shapes import hub_id
from vlmrl.system.plain_text import print_line
from vlmrl.system.scratch import scratch
from vlmrl.system.storage import writing

_ADVICE = {
    "compute": "more or faster GPUs would help, or fewer tokens",
    "memory bandwidth": "more responses decoded together would use it better: more KV cache, or fewer engines",
    "communication": "a faster network would help, or fewer passes and updates (train.max_tokens_per_gpu, "
    "train.batch_size), a lower ds.zero_stage, LoRA",
    "overhead": "larger batches would hide it",
    "rollout tail": "a shorter rollout.max_new_tokens, or train.async_enable, which samples meanwhile, would help",
}
_LEAST_MEMORY = {"train.max_tokens_per_gpu": 8192, "actor.gradient_checkpointing_enable": True}
_REMEDIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("LoRA (ds.lora.rank 32)", {"ds.lora.rank": 32}),
    ("QLoRA (ds.lora.rank 32, ds.load_in_4bit)", {"ds.lora.rank": 32, "ds.load_in_4bit": True}),
    ("no reference (algo.kl.init_coef 0)", {"algo.kl.init_coef": 0.0}),
)


def plan(config: PlanConfig) -> None:
    """Print the plan, and write its settings and picture.

    Raises:
        ConfigError: the model, the GPU or a measured run cannot be read, or lengths contradict each other.
        ClusterError: nothing fits; the message says what would.
    """
    settings = config.plan
    cluster = Cluster(settings.gpus, settings.gpus_per_node)
    with scratch() as folder:
        given = {name: value for name, value in config.given().items() if name != "actor.model_name_or_path"}
        planner = make_planner(config, folder)
        found = planner.search(cluster, given)
        if not found:
            raise ClusterError(_nothing_fits(config, planner, folder, cluster, given))
        best = found[: settings.alternatives]
        console = Console()
        _print(console, config, planner, best)
        if settings.output is not None:
            path = Path(settings.output).expanduser()
            with writing(path.name, path.parent):
                path.write_text(plan_yaml(config, planner, best[0]), encoding="utf-8")
            print_line(console, f"settings: {path}, for vlmrl rl --config {path}")
        if settings.picture is not None:
            picture = Path(settings.picture).expanduser()
            rows = [(_label(place), planner.step(place.settings).by_phase(planner.rates)) for place in best]
            with writing(picture.name, picture.parent):
                draw(rows, picture, title=_title(config))
            print_line(console, f"picture: {picture}")


def make_planner(config: PlanConfig, folder: Path, changes: Mapping[str, Any] | None = None) -> Planner:
    """Read the models and count their costs. `changes` are further settings, by full names."""
    settings = config.plan
    given = config.given() | dict(changes or {})
    given["actor.model_name_or_path"] = model_folder(config.actor.model_name_or_path, folder)
    for role in ("critic", "ref", "reward"):
        path = given.get(f"{role}.model_name_or_path")
        if path is not None:
            given[f"{role}.model_name_or_path"] = model_folder(path, folder)
    try:
        run = RlConfig.model_validate(nested({"data.prompt_dataset": config.data.prompt_dataset} | given))
    except ValidationError as error:
        raise ConfigError(f"the settings of the run contradict each other: {error.errors()[0]['msg']}") from None
    models = ConfiguredModels()
    _, processor = models.read(run.actor.model_name_or_path, run)
    machine, session = _machine(config), _session(config)
    check_hardware(run, session, actor_adapter_plan(run, processor))
    return Planner(
        run,
        machine,
        session,
        models,
        costs_of(run, models),
        costs_of(run, models, is_critic=True) if run.has_critic else None,
        workload_of(run, settings, processor),
        _rates(config),
    )


def plan_yaml(config: PlanConfig, planner: Planner, place: Found) -> str:
    """Return the settings of a placement as a YAML file for `vlmrl rl`."""
    settings, comments = planner.yaml_settings(place.settings), []
    for name, value in config.given().items():
        if name.endswith("model_name_or_path") and value is not None:
            settings[name] = hub_id(value)
            if Path(value).expanduser().is_file():
                settings[name] = str(Path(value).absolute().parent)
                comments.append(f"# {name} needs weights and a tokenizer beside the configuration.")
    settings["data.prompt_dataset"] = config.data.prompt_dataset
    lines = [
        f"# vlmrl plan: {_title(config)}, {_label(place)}",
        f"# Estimate, not measured: {place.seconds:.0f} s a step.",
        *comments,
    ]
    if "data.prompt_dataset" not in config.given():
        lines.append("# The dataset is an example: give your own.")
        settings["data.prompt_dataset"] = "geometry3k" if planner.workload.patches else "gsm8k"
    return "\n".join(lines) + "\n" + yaml.safe_dump(nested(settings), sort_keys=False, allow_unicode=True)


def _machine(config: PlanConfig) -> Machine:
    settings = config.plan
    if settings.gpu == "cpu":
        machine = this_machine()
        return Machine("cpu", machine.host_bytes, machine.host_bytes)
    gib = settings.gpu_memory_gib or gpu_of(settings.gpu).memory_gib
    nodes = -(-settings.gpus // settings.gpus_per_node)
    return Machine("cuda", gib * GIB, settings.host_memory_gib * GIB * nodes)


def _session(config: PlanConfig) -> Session:
    settings = config.plan
    count = min(settings.gpus, settings.gpus_per_node)
    on_cpu = settings.gpu == "cpu"
    gpus = () if on_cpu else tuple(map(str, range(count)))
    node = Node(id="", num_cpus=count, num_gpus=len(gpus), gpus=gpus)
    return Session((node,) * -(-settings.gpus // settings.gpus_per_node))


def _rates(config: PlanConfig) -> Rates:
    settings = config.plan
    initial = CPU if settings.gpu == "cpu" else rates_of(gpu_of(settings.gpu))
    if not settings.runs:
        return initial
    machine = _machine(config)
    runs = (Path(run).expanduser() for run in settings.runs)
    return fitted([read_run(run, machine, image_pixels=settings.image_pixels) for run in runs], initial)


def read_run(
    run: Path,
    machine: Machine,
    *,
    image_pixels: int,
    typical: Callable[[Iterable[float]], float] = median,
) -> Measured:
    """Read what a run measured. Raises ConfigError when the folder holds no run, or one of less than two steps.

    Args:
        image_pixels: of a prompt's images together, of a model with images.
        typical: see `plan.measured.step_seconds`.
    """
    if not (run / "config.yaml").is_file() or not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"plan.runs: {run} is no output folder of a run: it lacks config.yaml or metrics.jsonl")
    config, models = load(RlConfig, ["--config", str(run / "config.yaml")]), ConfiguredModels()
    _, processor = models.read(config.actor.model_name_or_path, config)
    patches, _ = image_sizes(image_pixels, processor)
    return measured_run(
        config,
        read_metrics(run / "metrics.jsonl"),
        models,
        cache_bytes=cache_bytes(memory_plan(config, machine, models)),
        device=machine.device,
        patches=patches,
        typical=typical,
    )


def _nothing_fits(
    config: PlanConfig, planner: Planner, folder: Path, cluster: Cluster, fixed: Mapping[str, Any]
) -> str:
    """Say what would fit: adapters, no reference, more GPUs. Only the placements of the least memory are tried."""
    would: list[str] = []
    fixed = {**_LEAST_MEMORY, **fixed}
    for name, changes in _REMEDIES:
        if all(setting_value(planner.config, flag) == value for flag, value in changes.items()):
            continue
        try:
            if make_planner(config, folder, changes).search(cluster, fixed):
                would.append(name)
        except ConfigError:
            continue  # the change contradicts a given setting
    nodes = max(1, cluster.gpus // cluster.gpus_per_node)
    for times in (2, 4, 8, 16):
        larger = Cluster(nodes * times * cluster.gpus_per_node, cluster.gpus_per_node)
        node = replace(planner.session.nodes[0], num_gpus=larger.gpus_per_node)
        machine = replace(planner.machine, host_bytes=planner.machine.host_bytes / cluster.nodes * larger.nodes)
        if replace(planner, session=Session((node,) * larger.nodes), machine=machine).search(larger, fixed):
            would.append(f"{larger.gpus} of these GPUs")
            break
    advice = f"what would fit: {', or '.join(would)}" if would else "give fewer of the settings that it chooses"
    return f"no placement of {_title(config)} fits, by estimate; {advice}"


def _title(config: PlanConfig) -> str:
    machine = "this CPU" if config.plan.gpu == "cpu" else _counted(config.plan.gpus, config.plan.gpu)
    return f"{config.actor.model_name_or_path} on {machine}"


def _label(place: Found) -> str:
    chosen = place.settings
    trainers = chosen["actor.num_nodes"] * chosen["actor.num_gpus_per_node"]
    engines, size = chosen["vllm.num_engines"], chosen["vllm.tensor_parallel_size"]
    return f"{place.mode}, {_counted(trainers, 'rank')}, {_counted(engines, 'engine')} of {size}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _trainer(settings: Settings) -> str:
    parts = [f"ZeRO-{settings['ds.zero_stage']}"]
    parts += ["offload"] if settings.get("ds.adam_offload") else []
    parts += ["sleep"] if settings.get("ds.enable_sleep") else []
    parts += ["checkpointing"] if settings["actor.gradient_checkpointing_enable"] else []
    if settings["ds.sequence_parallel_size"] > 1:
        parts.append(f"sequence {settings['ds.sequence_parallel_size']}")
    return ", ".join([*parts, f"{settings['train.max_tokens_per_gpu']} tokens"])


def _print(console: Console, config: PlanConfig, planner: Planner, best: Sequence[Found]) -> None:
    place, rates = best[0], planner.rates
    step, total = planner.step(place.settings), place.seconds
    origin = "rates fitted to measured runs" if config.plan.runs else "rates from data sheets, not measured"
    print_line(console, f"plan: {_title(config)}; all figures are estimates ({origin})")
    print_line(console, f"best of those that fit: {_label(place)}; {_trainer(place.settings)}")
    console.print(memory_table(planner.configured(place.settings), planner.memory(place.settings), planner.machine))
    table = Table(title=f"estimated step: {total:.1f} s")
    for column in ("phase", "seconds", "mostly"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for phase in step.phases:
        reasons = phase.by_reason(rates)
        table.add_row(phase.name, f"{phase.seconds(rates):.2f}", max(reasons, key=lambda name: reasons[name]))
    console.print(table)
    name, reason, share = step.binding(rates)
    print_line(console, f"what binds: {reason} of {name}, {share:.0%} of what a step waits for; {_ADVICE[reason]}")
    others = Table(title="placements that fit, by estimated seconds of a step")
    phases = list(dict.fromkeys(p.name for found in best for p in planner.step(found.settings).phases))
    for column in ("placement", "trainer", "step", *phases):
        others.add_column(column, justify="left" if column in ("placement", "trainer") else "right")
    for found in best:
        seconds = planner.step(found.settings).by_phase(rates)
        cells = (f"{seconds[phase]:.1f}" if phase in seconds else "" for phase in phases)
        others.add_row(_label(found), _trainer(found.settings), f"{found.seconds:.1f}", *cells)
    console.print(others)
