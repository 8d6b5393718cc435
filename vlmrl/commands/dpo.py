"""`vlmrl dpo`: learn from preferences among responses of a dataset, without sampling."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from vlmrl.cluster.preferences import PreferencePolicy, Reference
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.role_settings import preference_loss
from vlmrl.commands.sampled_evaluation import Measure, start_sampler
from vlmrl.commands.stage import Stage, StageRun, run_stage
from vlmrl.config.num_steps import last_step
from vlmrl.config.stages import DpoConfig
from vlmrl.data.judgements import Judged, mismatched
from vlmrl.data.pairs import Pairs
from vlmrl.data.preference_step import summed
from vlmrl.data.reference_cache import ReferenceCache
from vlmrl.errors import ConfigError, EndOfRowsError
from vlmrl.models.adapter_files import base_fingerprint
from vlmrl.plugins import Processor
from vlmrl.trainer.evaluation import with_metric_names
from vlmrl.trainer.preference_evaluation import PreferenceEvaluation
from vlmrl.types import Metrics, Sample


def train_dpo(config: DpoConfig, *, dry_run: bool = False, is_quiet: bool = False) -> None:
    """Check the settings, start the models, resume if there is a checkpoint, train, and write the final model."""
    run_stage(config, partial(_start, config), dry_run=dry_run, is_quiet=is_quiet)


def _start(config: DpoConfig, run: StageRun) -> Stage:
    rows, report = run.rows, run.report
    if not config.dpo.is_paired:
        rows.check_classes()
    sets = with_metric_names(_evaluation_sets(config, rows))
    sampler = start_sampler(config, run)
    learners = run.builder.learners(config, run.processor, adapter=run.adapter, num_rows=run.num_rows, say=report.say)
    cache = None
    if config.dpo.needs_reference and config.dpo.precompute_reference:
        # The policy still has its initial weights: checkpoints are restored later, and a new adapter adds nothing.
        cache = _precomputed(config, run, list(sets.values()), learners.policy)
    loss, max_len = preference_loss(config), config.data.max_len
    policy = PreferencePolicy(learners.policy, loss, learners.reference, cache, max_len=max_len)
    measure: Measure = PreferenceEvaluation(sets, policy).measure
    if sampler is not None:
        measure = sampler.beside(measure, policy)
    if config.dpo.is_paired:
        return Stage(policy, rows.draw_pairs, policy.fit_pairs, measure)
    return Stage(policy, rows.draw_judged, policy.fit_judged, measure)


def _evaluation_sets(config: DpoConfig, rows: RemotePrompts) -> dict[str, Pairs | Judged]:
    if config.dpo.is_paired:
        return dict(rows.evaluation_pairs())
    return dict(rows.evaluation_judged())


def _batches(config: DpoConfig, rows: RemotePrompts, num_rows: int) -> Iterator[Pairs | Judged]:
    """Yield the next `num_rows` rows in the batches of the run; those at its end that fill none come one by one."""
    draw: Callable[[int], tuple[Pairs | Judged, Metrics]] = (
        rows.draw_pairs if config.dpo.is_paired else rows.draw_judged
    )
    size, num_drawn = config.train.batch_size, 0
    while num_drawn < num_rows:
        try:
            batch, _ = draw(size)
        except EndOfRowsError:  # rows are dropped
            if size == 1:
                return
            size = 1
        else:
            num_drawn += size
            yield batch


def _precomputed(config: DpoConfig, run: StageRun, sets: Sequence[Pairs | Judged], model: Reference) -> ReferenceCache:
    """Compute the reference of all rows that the run draws, and of those held out, as far as its file lacks them."""
    rows, path = run.rows, run.folder.reference
    cache = ReferenceCache(path, reference=_identity(config))

    def add(batch: Pairs | Judged) -> None:
        samples: list[Sample] = list(batch.samples)
        if not config.dpo.is_paired and len(samples) > 1:
            samples += mismatched(samples, max_len=config.data.max_len)
        if missing := cache.missing(samples):
            cache.add(missing, summed(missing, model.logprobs(missing)))

    for batch in sets:
        add(batch)
    before = rows.state()
    data = _digest([before["data"], _settings_of_tokens(config, run.processor)])
    num_rows = _rows_to_draw(config, run.num_rows)
    is_complete = cache.is_complete(num_rows, data=data)
    if not is_complete:
        # A resumed run has drawn rows in the batches of another one, and draws the rest of its steps in its own.
        num_rows = min(cache.num_rows + num_rows, run.num_rows * config.train.max_epochs)
    # The rows of the batches do not depend on their size, but the baseline of KTO does.
    if not is_complete or not config.dpo.is_paired:
        for batch in _batches(config, rows, num_rows):
            add(batch)
        rows.load_state(before)
    if not is_complete:
        cache.set_complete(num_rows, data=data)
    run.report.say(f"reference: log-probs of {len(cache)} responses under {config.actor.model_name_or_path}, in {path}")
    return cache


def _rows_to_draw(config: DpoConfig, num_rows: int) -> int:
    """Return the number of rows that a new run may draw."""
    if config.train.max_steps is not None:
        return last_step(config, num_rows) * config.train.batch_size
    return num_rows * config.train.max_epochs


def _settings_of_tokens(config: DpoConfig, processor: Processor) -> list[Any]:
    """Return what decides, besides the rows, which tokens and images a run draws, as JSON."""
    tokenizer = processor.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    batches = None if config.train.max_steps is None else [config.train.batch_size, config.train.max_steps]
    return [
        config.data.model_dump(mode="json"),
        vocabulary,
        tokenizer.chat_template,
        processor.resize_settings,
        batches,
    ]


def _identity(config: DpoConfig) -> str:
    """Say which model the reference is, and in what numbers it computes. The same weights are the same model, wherever
    they lie."""
    actor, bits = config.actor, ", 4 bits" if config.ds.load_in_4bit else ""
    adapter = "" if actor.adapter_name_or_path is None else f" with {actor.adapter_name_or_path}"
    try:
        model = f"weights {base_fingerprint(actor.model_name_or_path)[:12]}"
    except ConfigError:  # a model without safetensors is known by its name only
        model = actor.model_name_or_path
    return f"{model}{adapter} ({config.ds.param_dtype}{bits})"


def _digest(value: Any) -> str:
    """Digest of a JSON value, 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
