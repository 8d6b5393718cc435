"""The policy: log-probs of samples, optimizer steps, weight sync and checkpoints of the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmrl.algorithms.aggregation import reduce, token_mean
from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.kl import kl_from_old
from vlmrl.algorithms.losses import FLAG, PolicyLoss, check, log_ratio, policy_loss
from vlmrl.data.experience import Experience
from vlmrl.data.packing import Pack, collect
from vlmrl.learning.base import PackLoss, TrainableModel
from vlmrl.learning.checkpoint import save_adapter, save_model
from vlmrl.learning.ema import Ema
from vlmrl.learning.forward import LogprobForward, RowsAndMetrics, read_model
from vlmrl.learning.higher_precision import higher_precision
from vlmrl.learning.inner_teacher import InnerTeacher
from vlmrl.learning.layout_check import compare_layouts
from vlmrl.learning.preferences import PreferenceLearner, preference_metrics
from vlmrl.learning.settings import PolicySettings
from vlmrl.learning.weights import WeightSender
from vlmrl.models.adapters import adapters_off
from vlmrl.models.linear_attention import mixes_samples
from vlmrl.models.patch_cost import patch_cost
from vlmrl.models.scorer import Scorer
from vlmrl.observe.metrics import Max, Mean, Metric, SampleSize, Sum, merge
from vlmrl.system.user_function import name_or_function
from vlmrl.types import Bools, Floats, Ints, Layout, Sample, Totals

__all__ = ["Policy", "PolicyLoss"]


class Policy(PreferenceLearner, WeightSender):
    """The trained model. Its methods are collectives but `table`, `memory` and `take_old_logprobs`."""

    _area = "policy"
    _section = "actor"
    _forward: LogprobForward

    def __init__(self, settings: PolicySettings) -> None:
        actor, ds, columns = settings.actor, settings.ds, settings.columns
        TrainableModel.__init__(
            self,
            lambda where: read_model(actor, ds=ds, columns=columns, where=where),
            model=actor,
            ds=ds,
            loop=settings.loop,
            adapter=settings.adapter,
        )
        WeightSender.__init__(self, self._net, settings.adapter)
        scorer = Scorer(self._net, self._sequence)
        options = self._start_engine(scorer, total_steps=settings.total_steps, vision=settings.vision)
        self._forward = LogprobForward(
            scorer, self._processor, temperature=settings.temperature, bans=settings.bans, **options
        )
        self._forward.replays_experts = settings.replays_experts
        self._loss = None if settings.loss is None else _load_user_loss(settings.loss)
        self._teacher = None
        if settings.teacher is not None:
            self._teacher = InnerTeacher(settings.teacher, settings, processor=self._processor, where=self._device)
        self._found: list[tuple[Pack, Tensor]] = []
        """Old log-probs that the last update computed itself: [B, T] of each pack."""
        self._average = None if settings.ema_beta is None else Ema(self._net, beta=settings.ema_beta)

    def logprobs(
        self, packs: Sequence[Pack], *, gradient: bool = False, adapter: bool = True, exact: bool = False
    ) -> RowsAndMetrics:
        """Return log-probs under the current weights: (id, [T]) for each sample with a non-negative id, and pass
        metrics.

        Args:
            gradient: run the passes as an update does, without changing anything.
            adapter: False for the log-probs of the base, the reference of a policy that trains an adapter.
            exact: compute in a wider type than the run's: fp32 in a run in bf16, else fp64.
        """
        wide = torch.float32 if self._ds.param_dtype == "bf16" else torch.float64
        with (
            nullcontext() if adapter else adapters_off(self._net),
            nullcontext() if adapter else self._forward.without_replay(),
            higher_precision(self._net, wide) if exact else nullcontext(),
            self._forward.without_cache() if exact else nullcontext(),
        ):
            return self._forward.logprobs(packs, gradient=gradient), self._forward.take_counts()

    def take_old_logprobs(self, ids: Sequence[int]) -> dict[int, Floats]:
        """Return, once, the old log-probs that the last update computed itself, [T] by number of the sample: those of
        `ids` that this rank had. No collective."""
        packs = [(pack, values) for pack, values in self._found if not set(ids).isdisjoint(pack.ids)]
        self._found.clear()  # a later step may have no update
        rows = {i: row for pack, values in packs for i, row in zip(pack.ids, collect(pack, values), strict=True)}
        return {i: rows[i] for i in ids if i in rows}

    def compare_layouts(
        self, samples: Sequence[Sample], layouts: Sequence[Layout]
    ) -> dict[Layout, tuple[float, float]]:
        """Compare each of `layouts` with `padded` on these samples, in fp32: relative differences of values and
        gradients (see `learning.layout_check`). {} on all ranks but the first."""
        differences = compare_layouts(
            self._net,
            self._processor,
            samples,
            layouts,
            attention=self._ds.attn_implementation,
            device=self._device,
        )
        # Plain tuples: to unpickle another type, the driver would have to import this package.
        return {layout: (gaps.values, gaps.gradients) for layout, gaps in differences.items()}

    def traits(self) -> tuple[float, bool]:
        """Return the cost of a vision patch in a pass, in language tokens, and whether layers carry state past a
        sample's end."""
        return patch_cost(self._net, self._processor), mixes_samples(self._net)

    def update(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        """Take one optimizer step per element of `work`: this rank's packs of that step. Returns its metrics per step.

        Each experience is in the order of its pack's samples. `totals` are counts of each step over all ranks, so the
        gradient does not depend on how samples are spread over ranks.

        When the KL divergence from the policy before this update, on the samples of a step, exceeds `kl_early_stop`,
        that step and all later ones are skipped, on all ranks.

        Raises VlmrlError when the loss or the gradient is not finite.
        """
        with self._optimizer_awake():
            return self._update(work, totals)

    def _update(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        metrics: list[dict[str, Metric]] = []
        self._found.clear()
        for packs, total in zip(work, totals, strict=True):
            if metrics and self._exceeds_kl_bound(packs):
                counts = self._forward.take_counts()
                metrics[-1] = merge([metrics[-1], counts, {"policy/stopped_early": Max(1.0)}])
                break
            self._set_progress(packs[0][1].span)
            of_rank = [pack for pack, _ in packs]
            shares = [
                self._backward(self._policy_loss(pack, experience, total), pack, number=n, of=of_rank)
                for n, (pack, experience) in enumerate(packs, start=1)
            ]
            metrics.append(merge([*shares, self._step()]))
        return metrics

    def fit(self, packs: Sequence[Pack], total: Totals) -> dict[str, Metric]:
        """Take one optimizer step on the mean negative log-probability of the packs' sampled tokens, or with a teacher
        on a mean of that and the divergence from the teacher.

        Raises VlmrlError when the loss or the gradient is not finite.
        """
        with self._optimizer_awake():
            shares = [
                self._backward(self._likelihood_loss(pack, total), pack, number=n, of=packs)
                for n, pack in enumerate(packs, start=1)
            ]
            counts = {} if self._teacher is None else self._teacher.take_counts()
            return merge([*shares, counts, self._step()])

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the full training state, from which `load_checkpoint` resumes bit for bit; `extra` is plain JSON."""
        self._save_state(folder, extra)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Resume from a checkpoint, random states included; returns its `extra`.

        Raises ConfigError when the checkpoint is of another model, number of ranks or ZeRO stage.
        """
        return self._load_state(folder)

    def save_model(self, folder: Path) -> None:
        """Write a folder that `from_pretrained` and vLLM load: weights in safetensors, config, tokenizer, processor.

        With an adapter, write only the adapter, for PEFT and vLLM.
        """
        if self._adapted is None:
            save_model(self._net, self._processor, Path(folder))
        else:
            save_adapter(self._net, self._adapted, Path(folder))

    def save_average(self, folder: Path) -> None:
        """Write what `save_model` does, with the moving average instead of the current weights."""
        assert self._average is not None, "a policy without ema_beta keeps no average"
        with self._average.swapped():
            self.save_model(folder)

    def _exceeds_kl_bound(self, packs: Sequence[tuple[Pack, Experience]]) -> bool:
        """Whether the KL divergence on the next step's samples exceeds `kl_early_stop`. If a bound is set, this is a
        collective with an additional pass: the passes of earlier steps do not include the effect of their own step."""
        if self._loss is None or self._loss.kl_early_stop is None:
            return False
        old_rows: list[tuple[Floats, Bools]] = []
        for pack, experience in packs:
            assert experience.old_logprobs is not None, "several steps need the log-probs that they start from"
            rows = zip(experience.old_logprobs, pack.samples, pack.ids, strict=True)
            old_rows += [(old[sample.sampled], sample.sampled) for old, sample, i in rows if i >= 0]
        total, count = 0.0, 0
        new_rows = self._forward.logprobs([pack for pack, _ in packs])
        for (_, row), (old, sampled) in zip(new_rows, old_rows, strict=True):
            new = torch.from_numpy(row[sampled])
            total += float(kl_from_old(new, torch.from_numpy(old)).sum())
            count += len(new)
        all_total, all_count = self._sum_over_ranks([total, count])
        return all_total > self._loss.kl_early_stop * all_count

    def _policy_loss(self, pack: Pack, experience: Experience, total: Totals) -> PackLoss:
        assert self._loss is not None, "a policy without a loss cannot learn from rewards"
        settings = self._loss
        output = self._forward(pack)
        sampled = self._place(pack, [s.sampled for s in pack.samples], fill=False)
        owner = self._place(pack, _repeated(pack, pack.owners), fill=0)
        lengths = self._place(pack, _repeated(pack, [sample.length_of_response for sample in pack.samples]), fill=0)
        logprobs = output.logprobs.float()
        if experience.old_logprobs is None:
            old = logprobs.detach()
            self._found.append((pack, old))
        else:
            old = self._place(pack, experience.old_logprobs, fill=0.0)
        rollout = self._place(pack, experience.rollout_logprobs, fill=0.0)
        ref = experience.ref_logprobs if experience.kl_coef > 0 else None
        terms = policy_loss(
            settings,
            logprobs=logprobs,
            old=old,
            rollout=rollout,
            advantages=self._place(pack, experience.advantages, fill=0.0),
            sampled=sampled,
            owner=owner,
            # Its gradient costs time, so only where it is used.
            entropy=output.entropy.float() if settings.entropy_coef > 0 else None,
            reference=None if ref is None else self._place(pack, ref, fill=0.0),
            kl_coef=experience.kl_coef,
        )
        share = reduce(
            terms.losses,
            sampled,
            aggregation=settings.aggregation,
            lengths=lengths,
            totals=total,
            max_tokens=settings.max_tokens,
        )
        with torch.no_grad():
            gap = log_ratio(logprobs, old, sampled)
            sums = {
                "clipped": terms.clipped.sum(),
                "entropy": torch.where(sampled, output.entropy.float(), 0.0).sum(),
                "kl_old": kl_from_old(gap, torch.zeros_like(gap)).sum(),
                "kl_loss": torch.where(sampled, terms.kl, 0.0).sum(),
                "ratio_max": torch.where(sampled, terms.ratio, 0.0).amax(),
                "tokens": sampled.sum(),
            }
            if self._forward.replays_experts:
                differing, chosen = self._forward.take_replay_counts()
                sums |= {"experts_differing": differing, "experts_chosen": chosen}
            if settings.correction is not None:
                sums |= {"weight": terms.weights.sum(), "dropped": (sampled & (terms.weights == 0)).sum()}
                sums |= {"weight_squared": terms.weights.square().sum()}
                sums |= _ratio_to_engine(settings.correction, log_ratio(old, rollout, sampled), sampled)
            if experience.old_logprobs is None:
                sums |= _engine_gap(torch.where(sampled, old - rollout, 0.0).double())
        return share, sums

    def _likelihood_loss(self, pack: Pack, total: Totals) -> PackLoss:
        output = self._forward(pack, teacher=None if self._teacher is None else self._teacher.rows(pack))
        sampled = self._place(pack, [s.sampled for s in pack.samples], fill=False)
        losses = -output.logprobs.float()
        sums = {"entropy": output.entropy}
        if self._teacher is not None and output.divergence is not None:
            sums |= {"nll": losses, "divergence": output.divergence}
            coef = self._teacher.coef
            # With coef 1 the log-probs need no backward pass.
            losses = coef * output.divergence.float() + ((1 - coef) * losses if coef < 1 else 0.0)
        share = token_mean(losses, sampled, num_tokens=total.num_tokens)
        with torch.no_grad():
            totals = {name: torch.where(sampled, values.float(), 0.0).sum() for name, values in sums.items()}
        return share, totals | {"tokens": sampled.sum()}

    def _pack_metrics(self, sums: dict[str, float], pack: Pack) -> dict[str, Metric]:
        tokens = sums["tokens"]
        rows, columns = pack.shape
        padding = rows * columns - pack.num_tokens
        metrics: dict[str, Metric] = {
            "policy/entropy": Mean(sums["entropy"], tokens),
            "pack/tokens": Sum(pack.num_tokens),
            "pack/padding_fraction": Mean(padding, rows * columns),
            "pack/shared_fraction": Mean(pack.num_useful - pack.num_tokens, pack.num_useful),
        }
        if "aux_loss" in sums:
            metrics["policy/aux_loss"] = Mean(sums["aux_loss"], sums["balanced"])
        if "experts_chosen" in sums:
            metrics["policy/experts_replaced"] = Mean(sums["experts_differing"], sums["experts_chosen"])
        if "chosen" in sums:
            metrics |= preference_metrics(sums)
        if "gap" in sums:
            metrics |= {
                "sync/logprob_diff_max": Max(sums["gap_max"]),
                "sync/logprob_diff_mean": Mean(sums["gap"], tokens),
                "sync/kl_rollout_train": Mean(sums["gap_kl"], tokens),
            }
        if "divergence" in sums:
            metrics |= {
                "distill/kl": Mean(sums["divergence"], tokens),
                "distill/nll": Mean(sums["nll"], tokens),
            }
        if "weight" in sums:
            metrics |= {
                "policy/correction_weight": Mean(sums["weight"], tokens),
                "policy/correction_dropped": Mean(sums["dropped"], tokens),
                "is/ess": SampleSize(sums["weight"], sums["weight_squared"], tokens),
                "is/mean": Mean(sums["is_ratio"], tokens),
                "is/clipped": Mean(sums["is_outside"], tokens),
            }
        if "clipped" in sums:
            metrics |= {
                "policy/clip_fraction": Mean(sums["clipped"], tokens),
                "policy/kl_old": Mean(sums["kl_old"], tokens),
                "policy/kl_loss": Mean(sums["kl_loss"], tokens),
                "policy/ratio_max": Max(sums["ratio_max"]),
            }
        return metrics


def _repeated(pack: Pack, numbers: Sequence[int]) -> list[Ints]:
    """One number per sample, repeated for each of its tokens."""
    return [np.full(len(sample.tokens), number) for sample, number in zip(pack.samples, numbers, strict=True)]


def _load_user_loss(loss: PolicyLoss) -> PolicyLoss:
    """Replace `FILE:NAME` by the user's function, imported in this process."""
    kind = name_or_function(loss.kind, FLAG) if isinstance(loss.kind, str) else loss.kind
    if callable(kind):
        check(kind)
    return replace(loss, kind=kind)


def _ratio_to_engine(correction: Correction, log_ratio: Tensor, sampled: Tensor) -> dict[str, Tensor]:
    """Sums over a pack of the ratio of probabilities in trainer and engine, and of the tokens where it is outside the
    correction's range."""
    ratio = log_ratio.exp()
    outside = sampled & ((ratio < correction.low) | (ratio > correction.high))
    return {"is_ratio": torch.where(sampled, ratio, 0.0).sum(), "is_outside": outside.sum()}


def _engine_gap(difference: Tensor) -> dict[str, Tensor]:
    """Maximum and sums over a pack for the metrics of `verify.logprobs.compare_engine`, from trainer minus engine
    log-probs."""
    size = difference.abs()
    return {"gap_max": size.max(), "gap": size.sum(), "gap_kl": (torch.expm1(difference) - difference).sum()}
