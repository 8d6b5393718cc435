"""The model that learns to answer: scores samples, takes optimizer steps, and is saved."""

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
from vlmrl.algorithms.kl import kl_from_old
from vlmrl.algorithms.losses import FLAG, PolicyLoss, check, log_ratio, policy_loss
from vlmrl.data.packing import Pack
from vlmrl.learning.base import Learner, Share
from vlmrl.learning.checkpoint import save_adapter, save_model
from vlmrl.learning.ema import Ema
from vlmrl.learning.exact import widened
from vlmrl.learning.forward import Forward, Scored, read_model
from vlmrl.learning.layout_check import compare_layouts
from vlmrl.learning.settings import PolicySettings
from vlmrl.learning.weights import WeightSender
from vlmrl.models.adapters import adapters_off
from vlmrl.models.cost import patch_cost
from vlmrl.models.scorer import Scorer
from vlmrl.observe.metrics import Max, Mean, Metric, Sum, merge
from vlmrl.system.user_function import name_or_function
from vlmrl.types import Bools, Experience, Floats, Layout, Sample, Totals

__all__ = ["Policy", "PolicyLoss"]


class Policy(Learner, WeightSender):
    """One per rank. Every method but `table` and `memory` is a collective: call it on all ranks, in the same order.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this is; without them it is alone.
    """

    _area = "policy"
    _section = "actor"
    _forward: Forward

    def __init__(self, settings: PolicySettings) -> None:
        actor, ds, columns = settings.actor, settings.ds, settings.columns
        Learner.__init__(
            self,
            lambda where: read_model(actor, ds=ds, columns=columns, where=where),
            model=actor,
            ds=ds,
            loop=settings.loop,
            adapter=settings.adapter,
        )
        WeightSender.__init__(self, self._net, settings.adapter)
        scorer = Scorer(self._net)
        passing = self._begin(scorer, total_steps=settings.total_steps, vision=settings.vision)
        self._forward = Forward(
            scorer, self._processor, temperature=settings.temperature, bans=settings.bans, **passing
        )
        self._loss = None if settings.loss is None else _with_own(settings.loss)
        self._average = None if settings.ema_beta is None else Ema(self._net, beta=settings.ema_beta)

    def logprobs(
        self, packs: Sequence[Pack], *, gradient: bool = False, adapter: bool = True, exact: bool = False
    ) -> Scored:
        """(id, [T]) of each sample with an id of 0 or more, under the weights of now, and what it took.

        With `gradient` they come from the passes that an update makes, which change nothing. Without `adapter` they are
        those of the base: the reference of a policy that is nothing but an adapter on it. With `exact` the passes
        compute in a wider type than the run's: fp32 in a run in bf16, else fp64.
        """
        wide = torch.float32 if self._ds.param_dtype == "bf16" else torch.float64
        with (
            nullcontext() if adapter else adapters_off(self._net),
            widened(self._net, wide) if exact else nullcontext(),
            self._forward.looking_anew() if exact else nullcontext(),
        ):
            return self._forward.logprobs(packs, gradient=gradient), self._forward.take_counts()

    def compare_layouts(
        self, samples: Sequence[Sample], layouts: Sequence[Layout]
    ) -> dict[Layout, tuple[float, float]]:
        """How far each of `layouts` is from `padded` on these samples, in fp32: values and gradients, relative (see
        `learning.layout_check`). Nothing on ranks but the first."""
        attention = self._ds.attn_implementation
        found = compare_layouts(self._net, self._processor, samples, layouts, attention=attention, device=self._device)
        # Plain numbers: a driver would have to import this package to read anything else.
        return {layout: (gaps.values, gaps.gradients) for layout, gaps in found.items()}

    def traits(self) -> tuple[float, bool]:
        """What a vision patch costs a pass, in language tokens; and whether layers carry state past a sample's end."""
        return patch_cost(self._net, self._processor), bool(self._net._is_stateful)

    def update(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        """Take one optimizer step per element of `work`; each is this rank's share of that step, pack by pack.

        Experiences line up with the samples of their packs. `totals` count what the step holds over all ranks, so the
        gradient does not depend on how the step was dealt out. Returns this rank's metrics of each step.

        From the first step on whose samples show the policy further than `kl_early_stop` from where it started, steps
        are left out, on all ranks alike.

        Raises VlmrlError when the loss or the gradient is not a number.
        """
        with self._optimizer_awake():
            return self._update(work, totals)

    def _update(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        metrics: list[dict[str, Metric]] = []
        for packs, total in zip(work, totals, strict=True):
            if metrics and self._is_far(packs):
                looked = self._forward.take_counts()
                metrics[-1] = merge([metrics[-1], looked, {"policy/stopped_early": Max(1.0)}])
                break
            self._follow(packs[0][1].span)
            shares = [
                self._backward(self._policy_loss(pack, experience, total), pack, is_last=n == len(packs))
                for n, (pack, experience) in enumerate(packs, start=1)
            ]
            metrics.append(merge([*shares, self._step()]))
        return metrics

    def fit(self, packs: Sequence[Pack], total: Totals) -> dict[str, Metric]:
        """One optimizer step on the mean negative log-probability of the tokens that the packs flag as sampled.

        Raises VlmrlError when the loss or the gradient is not a number.
        """
        with self._optimizer_awake():
            shares = [
                self._backward(self._likelihood_loss(pack, total), pack, is_last=n == len(packs))
                for n, pack in enumerate(packs, start=1)
            ]
            return merge([*shares, self._step()])

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Everything that `load_checkpoint` needs to go on as if nothing had happened; `extra` is plain JSON."""
        self._save_state(folder, extra)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint, random numbers included; returns its `extra`.

        Raises ConfigError when it is not a checkpoint of this model, these ranks and this ZeRO stage.
        """
        return self._load_state(folder)

    def save_model(self, folder: Path) -> None:
        """A folder that `from_pretrained` and vLLM load: weights in safetensors, config, tokenizer, processor.

        With an adapter, one that PEFT and vLLM load: the adapter alone.
        """
        if self._adapted is None:
            save_model(self._net, self._processor, Path(folder))
        else:
            save_adapter(self._net, self._adapted, Path(folder))

    def save_average(self, folder: Path) -> None:
        """What `save_model` writes, with the moving average in the place of the weights of now."""
        assert self._average is not None, "a policy without ema_beta keeps no average"
        with self._average.swapped():
            self.save_model(folder)

    def _is_far(self, packs: Sequence[tuple[Pack, Experience]]) -> bool:
        """Whether a coming step's samples say that the rest of an update is to be left out. A collective, and a pass
        without gradient, where somebody set a bound: what the steps before have done cannot be told from their own
        samples, which they met before they moved."""
        if self._loss is None or self._loss.kl_early_stop is None:
            return False
        asked: list[tuple[Floats, Bools]] = []
        for pack, experience in packs:
            assert experience.old_logprobs is not None, "several steps need the log-probs that they start from"
            found = zip(experience.old_logprobs, pack.samples, pack.ids, strict=True)
            asked += [(old[sample.sampled], sample.sampled) for old, sample, i in found if i >= 0]
        total, count = 0.0, 0
        rows = self._forward.logprobs([pack for pack, _ in packs])
        for (_, row), (old, sampled) in zip(rows, asked, strict=True):
            now, then = torch.from_numpy(row[sampled]), torch.from_numpy(old)
            total += float(kl_from_old(now, then).sum())
            count += len(now)
        all_total, all_count = self._sum_over_ranks([total, count])
        return all_total > self._loss.kl_early_stop * all_count

    def _policy_loss(self, pack: Pack, experience: Experience, total: Totals) -> Share:
        """This pack's share of the step's loss, and sums over its sampled tokens."""
        assert self._loss is not None, "a policy without a loss cannot learn from rewards"
        knobs = self._loss
        output = self._forward(pack)
        sampled = self._placed(pack, [s.sampled for s in pack.samples], fill=False)
        owner = self._placed(pack, [np.full(len(s.tokens), i) for i, s in enumerate(pack.samples)], fill=0)
        logprobs = output.logprobs.float()
        if experience.old_logprobs is None:
            old = logprobs.detach()
        else:
            old = self._placed(pack, experience.old_logprobs, fill=0.0)
        rollout = self._placed(pack, experience.rollout_logprobs, fill=0.0)
        ref = experience.ref_logprobs if experience.kl_coef > 0 else None
        terms = policy_loss(
            knobs,
            logprobs=logprobs,
            old=old,
            rollout=rollout,
            advantages=self._placed(pack, experience.advantages, fill=0.0),
            sampled=sampled,
            owner=owner,
            # Only who wants it pays for its gradient.
            entropy=output.entropy.float() if knobs.entropy_coef > 0 else None,
            reference=None if ref is None else self._placed(pack, ref, fill=0.0),
            kl_coef=experience.kl_coef,
        )
        share = reduce(
            terms.losses,
            sampled,
            aggregation=knobs.aggregation,
            owner=owner,
            totals=total,
            max_new_tokens=knobs.max_new_tokens,
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
            if knobs.correction is not None:
                sums |= {"weight": terms.weights.sum(), "dropped": (sampled & (terms.weights == 0)).sum()}
            if experience.old_logprobs is None:
                sums |= _engine_gap(torch.where(sampled, old - rollout, 0.0).double())
        return share, sums

    def _likelihood_loss(self, pack: Pack, total: Totals) -> Share:
        output = self._forward(pack)
        sampled = self._placed(pack, [s.sampled for s in pack.samples], fill=False)
        share = token_mean(-output.logprobs.float(), sampled, num_tokens=total.num_tokens)
        with torch.no_grad():
            entropy = torch.where(sampled, output.entropy.float(), 0.0).sum()
        return share, {"entropy": entropy, "tokens": sampled.sum()}

    def _measure(self, found: dict[str, float], pack: Pack) -> dict[str, Metric]:
        tokens = found["tokens"]
        rows, columns = pack.shape
        padding = rows * columns - pack.num_tokens
        metrics: dict[str, Metric] = {
            "policy/entropy": Mean(found["entropy"], tokens),
            "pack/tokens": Sum(pack.num_tokens),
            "pack/padding_fraction": Mean(padding, rows * columns),
            "pack/shared_fraction": Mean(pack.num_useful - pack.num_tokens, pack.num_useful),
        }
        if "gap" in found:
            metrics |= {
                "sync/logprob_diff_max": Max(found["gap_max"]),
                "sync/logprob_diff_mean": Mean(found["gap"], tokens),
                "sync/kl_rollout_train": Mean(found["gap_kl"], tokens),
            }
        if "weight" in found:
            metrics |= {
                "policy/correction_weight": Mean(found["weight"], tokens),
                "policy/correction_dropped": Mean(found["dropped"], tokens),
            }
        if "clipped" in found:
            metrics |= {
                "policy/clip_fraction": Mean(found["clipped"], tokens),
                "policy/kl_old": Mean(found["kl_old"], tokens),
                "policy/kl_loss": Mean(found["kl_loss"], tokens),
                "policy/ratio_max": Max(found["ratio_max"]),
            }
        return metrics


def _with_own(loss: PolicyLoss) -> PolicyLoss:
    """The same, a user's own function read from its file in this process."""
    kind = name_or_function(loss.kind, FLAG) if isinstance(loss.kind, str) else loss.kind
    if callable(kind):
        check(kind)
    return replace(loss, kind=kind)


def _engine_gap(difference: Tensor) -> dict[str, Tensor]:
    """What `trainer.compare_engine` tells, as sums over a pack."""
    size = difference.abs()
    return {"gap_max": size.max(), "gap": size.sum(), "gap_kl": (torch.expm1(difference) - difference).sum()}
