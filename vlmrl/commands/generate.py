"""`vlmrl generate`: sample responses to the rows of a dataset, score them, and write them as rows for other verbs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.rewards import RewardSources
from vlmrl.commands.merged_actor import with_merged_actor
from vlmrl.commands.preflight import check_data
from vlmrl.commands.run import prepare, run_session
from vlmrl.config.names import setting_value
from vlmrl.config.verbs import GenerateConfig
from vlmrl.data.digests import digest_file
from vlmrl.data.fingerprint import compare
from vlmrl.data.row_file import write_rows
from vlmrl.errors import ConfigError, DataError
from vlmrl.observe.report import RunReport
from vlmrl.observe.run_folder import RunFolder
from vlmrl.observe.transcripts import Transcripts
from vlmrl.plugins import Processor
from vlmrl.system import stops
from vlmrl.system.journal import Journal
from vlmrl.system.plain_text import one_line
from vlmrl.system.stops import Stopped
from vlmrl.system.storage import writing
from vlmrl.trainer.generation import IMAGES, Totals, images_of, records, rows
from vlmrl.types import Metrics, Prompt, Sampling

_NOT_COMPARED = frozenset(
    {
        *("data.max_dropped_fraction", "data.allow_image_urls", "data.image_roots", "rollout.batch_size"),
        *("reward.time_limit_s", "reward.num_workers", "reward.pass_env", "reward.max_failed_fraction"),
        *("reward.num_nodes", "reward.num_gpus_per_node", "reward.offload"),
    }
)
"""Settings of the compared sections that no response and no score depends on."""
_MODELS = (
    *("actor.model_name_or_path", "actor.adapter_name_or_path"),
    *("reward.model_name_or_path", "reward.process_model_name_or_path"),
)
_MODEL_FILES = (".safetensors", ".json", ".jinja")
"""Suffixes of a model's files that responses depend on: weights, configurations, tokenizer, chat template."""
_SHOWN_PROMPTS = 8
"""Prompts of a batch whose responses the report shows."""
_COMPARED_SECTIONS = ("actor", "data", "reward", "rollout", "train.seed", "ds.param_dtype")


def generate(config: GenerateConfig, *, dry_run: bool = False, is_quiet: bool = False) -> None:
    """Check the settings, sample and score what is missing of the responses, and write the rows."""
    folder, processor, warnings = prepare(config, dry_run=dry_run)
    output = output_of(config, folder)
    journal = Journal(folder.responses)
    check_output(output, folder)
    settings = settings_of(config)
    check_same_settings(journal, settings)
    if dry_run:
        return check_data(config, warnings)
    with run_session(config, folder, warnings, is_quiet=is_quiet) as (builder, report):
        journal = Journal(folder.responses)  # again: another run may have held the lock until now
        check_same_settings(journal, settings)
        try:
            tokens_per_s = _complete(config, folder, journal, settings, processor, builder, report)
            check_output(output, folder)  # again: hours may have passed
            remember_output(output, folder)
            metrics = _write(config, journal, output, tokens_per_s=tokens_per_s)
        except Stopped as stop:
            raise Stopped(stop.number, _state(journal)) from None
        report.evaluation(_num_batches(config, journal.position), metrics)
        if failed := int(metrics["generate/failed"]):
            report.say(Text(_failures(failed, journal)))  # no plain string: it may look like Rich's markup
        summary = {"output": str(output)} | {name: round(value, 6) for name, value in metrics.items()}
        report.say(json.dumps(summary))
        stops.mark_done()


def output_of(config: GenerateConfig, folder: RunFolder) -> Path:
    """Return the file of the rows."""
    given = config.generate.output
    return folder.root / "generated.jsonl" if given is None else Path(given).expanduser().absolute()


def check_output(output: Path, folder: RunFolder) -> None:
    """Check that the rows can be written there. Writes nothing.

    Raises:
        ConfigError: the file exists and is not this run's, or its folder cannot be written.
    """
    known = folder.outputs.read_text().splitlines() if folder.outputs.exists() else []
    if output.is_dir() or (output.exists() and str(output) not in known):
        kind = "is a folder" if output.is_dir() else "exists, and was not written by this run"
        raise ConfigError(f"generate.output {output} {kind}: choose another")
    existing = next(path for path in output.parents if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"generate.output {output}: {existing} cannot be written: choose another folder")


def remember_output(output: Path, folder: RunFolder) -> None:
    """Note that this run writes that file, so that it may write it again. Raises StorageError."""
    with writing(folder.outputs.name, folder.root), folder.outputs.open("a") as lines:
        lines.write(f"{output}\n")


def settings_of(config: GenerateConfig) -> dict[str, Any]:
    """Return all that a response and its score depend on, except the data: full name of a setting -> value."""
    unread = config.unread()
    names = [
        name
        for name in GenerateConfig.settings()
        if name.startswith(_COMPARED_SECTIONS) and name not in _NOT_COMPARED and name not in unread
    ]
    settings = {name: setting_value(config, name) for name in names}
    settings["rollout.n_samples_per_prompt"] = config.eval.n_samples_per_prompt
    settings.pop("rollout.best_of", None)
    for name in _MODELS:
        if (path := setting_value(config, name)) is not None:
            folder = Path(path).expanduser()
            files = [file for suffix in _MODEL_FILES for file in sorted(folder.glob(f"*{suffix}"))]
            settings[f"files of {name}"] = _digests(files)
    if config.reward.user_function is not None:
        source = Path(config.reward.user_function.rpartition(":")[0]).expanduser()
        settings["file of reward.remote_url"] = _digests([source])
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _digests(files: Sequence[Path]) -> dict[str, list[Any] | None]:
    """Name of each file -> its size and digest; None for one that cannot be read."""
    digests = {file.name: digest_file(file, num_files=len(files)) for file in files}
    return {name: None if digest is None else [digest.size, digest.digest] for name, digest in digests.items()}


def check_same_settings(journal: Journal, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if the journal's responses were sampled or scored with other settings."""
    if journal.header is None:
        return
    saved = journal.header["settings"]
    different = [name for name in dict.fromkeys([*settings, *saved]) if settings.get(name) != saved.get(name)]
    if different:
        named = [
            f"{name} (different content)" if " " in name else f"{name} {saved.get(name)!r}, now {settings.get(name)!r}"
            for name in different
        ]
        raise ConfigError(
            f"{journal.path} holds responses of other settings: {'; '.join(named)}: give the same, or choose another "
            "--ckpt.output_dir"
        )


def _complete(
    config: GenerateConfig,
    folder: RunFolder,
    journal: Journal,
    settings: Mapping[str, Any],
    processor: Processor,
    builder: RoleBuilder,
    report: RunReport,
) -> float | None:
    """Sample and score what is missing, batch by batch; return the sampled tokens per second, None if none was."""
    prompts = builder.prompts(config, report.say)
    num_rows, data = prompts.evaluation_fingerprints()
    if journal.header is not None:
        differences = compare(journal.header["data"], data)
        if differences.certain:
            raise DataError(
                f"{journal.path} holds responses to other data ({'; '.join(differences.certain)}): give the same, or "
                "choose another --ckpt.output_dir"
            )
    journal.begin({"settings": settings, "data": data})
    done = _num_batches(config, journal.position)
    if journal.position:
        report.say(f"{journal.position} of {num_rows} rows have their responses already")
    if journal.position >= num_rows:
        report.begin(total_steps=done, done=done)
        return None
    take = prompts.begin_evaluation_rows(journal.position, config.rollout.batch_size)
    first = take()  # before engines start: its rows may be unusable
    merged = with_merged_actor(config, folder, builder.stack, report.say)
    engines, sources = builder.evaluation_roles(merged, processor, report)
    report.begin(total_steps=_num_batches(config, num_rows), done=done)
    batches = _Batches(config, folder, prompts, engines, sources, first=first)
    start, num_tokens = time.monotonic(), 0
    for step, position in enumerate(range(journal.position, num_rows, config.rollout.batch_size), start=done + 1):
        clock = time.monotonic()
        totals = batches.respond(report, journal, step, end=min(position + config.rollout.batch_size, num_rows))
        num_tokens += totals.tokens
        report.step(step, totals.batch_metrics(time.monotonic() - clock))
    return num_tokens / (time.monotonic() - start)


def _state(journal: Journal) -> str:
    """Say what a run that is stopped leaves."""
    if not journal.position:
        return "before its first responses were finished"
    return f"the responses to {journal.position} rows are in {journal.path}, and the same command goes on from there"


def _failures(count: int, journal: Journal) -> str:
    """Say that responses could not be scored, and what remains of them."""
    problems = (response["problem"] for record in journal.records() for response in record["responses"])
    first = one_line(next(problem for problem in problems if problem is not None), max_chars=200)
    return (
        f"{count} responses could not be scored (generate/failed), the first: {first}; they are only in rows of "
        "generate.keep all, and a resumed run does not score them again: for that give another --ckpt.output_dir, or "
        f"delete {journal.path}"
    )


def _num_batches(config: GenerateConfig, num_rows: int) -> int:
    return -(-num_rows // config.rollout.batch_size)


class _Batches:
    """Responses of one batch after the other."""

    def __init__(
        self,
        config: GenerateConfig,
        folder: RunFolder,
        prompts: RemotePrompts,
        engines: RemoteEngines,
        sources: RewardSources,
        *,
        first: Sequence[Prompt],
    ) -> None:
        """`first` are the prompts of the first batch."""
        self._has_scores = config.has_scores
        self._images = folder.root / IMAGES
        self._transcripts = Transcripts(folder.rollouts, prompts.save_media)
        self._prompts, self._engines, self._sources = prompts, engines, sources
        self._sampling = Sampling(
            n=config.eval.n_samples_per_prompt,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_new_tokens=config.rollout.max_new_tokens,
            seed=config.train.seed,
        )

        self._batch_size = config.rollout.batch_size
        self._take: Callable[[], Sequence[Prompt]] = lambda: first

    def respond(self, report: RunReport, journal: Journal, step: int, *, end: int) -> Totals:
        """Sample and score responses to the next rows, before row `end`, and add them to the journal.

        Those to the first prompts are also written as transcripts of batch `step`.
        """
        with report.phase("data"):
            prompts = self._take()
        # Read while the engines respond.
        self._take = self._prompts.begin_evaluation_rows(end, self._batch_size)
        with report.phase("rollout"):
            groups = self._engines.generate(prompts, self._sampling, self._sources.begin)
        with report.phase("reward"):
            scores = self._sources.score(groups) if self._has_scores else None
        batch = records(groups, scores)
        if media := images_of(groups):
            self._prompts.save_media(self._images, media)
        journal.append(batch, position=end)
        shown = None if scores is None else scores[:_SHOWN_PROMPTS]
        self._transcripts.write_evaluation(step, "generated", groups[:_SHOWN_PROMPTS], shown)
        totals = Totals()
        for record in batch:
            totals.add(record)
        return totals


def _write(config: GenerateConfig, journal: Journal, output: Path, *, tokens_per_s: float | None = None) -> Metrics:
    """Write the rows of all responses with their images, and return the metrics of all responses."""
    totals, threshold = Totals(), config.generate.label_threshold
    images = _ImageCopies(journal.path.parent / IMAGES, output.parent / IMAGES)

    def all_rows() -> Iterator[dict[str, Any]]:
        for record in journal.records():
            totals.add(record)
            for row in rows(record, keep=config.keep, label_threshold=threshold, min_score=config.generate.min_score):
                images.copy(record["images"])
                yield row

    num_written = write_rows(output, all_rows())
    if not num_written:
        raise DataError(
            f"generate.keep {config.keep} makes no row of {totals.responses} responses, of which {totals.scored} have "
            f"a score, {totals.empty} are empty and {totals.truncated} were cut at rollout.max_new_tokens; they are "
            "kept: generate.keep all writes them without sampling again"
        )
    return totals.metrics(written=num_written, tokens_per_s=tokens_per_s)


class _ImageCopies:
    """Copies images to the folder beside the rows, each once, if they lie elsewhere."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target = source, target
        self._missing = source.resolve() != target.resolve()

    def copy(self, names: Sequence[str]) -> None:
        """Copy those that are not there yet. Raises StorageError."""
        if not self._missing or not names:
            return
        with writing("images of the rows", self._target):
            self._target.mkdir(parents=True, exist_ok=True)
            for name in names:
                file = self._target / f"{name}.png"
                if not file.exists():
                    shutil.copyfile(self._source / file.name, file.with_suffix(".tmp"))
                    file.with_suffix(".tmp").replace(file)
