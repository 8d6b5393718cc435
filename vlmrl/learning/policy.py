"""The model that learns: scores samples, takes optimizer steps, and is saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from vlmrl.algorithms.kl import kl_to_reference
from vlmrl.algorithms.losses import PolicyLoss, clipped_surrogate, log_ratio
from vlmrl.algorithms.reduce import reduce, token_mean
from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.packing import Pack, place
from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.learning.checkpoint import Adapted, load_state, save_adapter, save_model, save_state
from vlmrl.learning.engine import device, init_distributed, is_plain, peak_bytes, seed, sharded_loading, start
from vlmrl.learning.forward import Forward, Scored, read_model
from vlmrl.learning.publisher import Publisher
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.adapters import Base, adapters_off, base_fingerprint, check_base, inject, read_adapter, set_tensors
from vlmrl.models.cost import patch_cost
from vlmrl.models.load import freeze, trainable_table
from vlmrl.models.scorer import Scorer
from vlmrl.observe.metrics import Max, Mean, Metric, Sum, merge
from vlmrl.types import Experience, Totals

__all__ = ["Policy", "PolicyLoss"]


class Policy(Publisher):
    """One per rank. Every method but `table` and `memory` is a collective: call it on all ranks, in the same order.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this is; without them it is alone.
    """

    def __init__(
        self,
        *,
        actor: Model,
        ds: Ds,
        loop: Loop,
        columns: Columns,
        vision: Vision,
        total_steps: int,
        loss: PolicyLoss | None,
        temperature: float,
        bans: bool,
        adapter: AdapterPlan | None = None,
    ) -> None:
        """`total_steps` is the number of optimizer steps of the whole run; `loss` is None for supervised training.

        With `bans`, the log-probs are of the distribution without the tokens that the engines never sample. With an
        `adapter` it alone trains, and goes on from `actor.adapter_name_or_path` where that is given.
        """
        init_distributed(loop.timeout_s)
        seed(loop.seed, deterministic=loop.full_determinism_enable)
        where = device()
        with sharded_loading(ds):
            net, self._processor = read_model(actor, ds=ds, columns=columns, where=where)
            freeze(net, self._processor, vision=actor.freeze_visual_encoder, projector=actor.freeze_projector)
            self._adapted = None if adapter is None else _adapt(net, adapter, actor, ds)
        super().__init__(net, adapter)
        self._table = trainable_table(self._net, self._processor)
        if actor.gradient_checkpointing_enable:
            self._checkpoint_activations(reentrant=actor.gradient_checkpointing_reentrant)
        scorer = Scorer(self._net).train()
        self._engine = start(scorer, actor=actor, ds=ds, total_steps=total_steps)
        self._world_size = torch.distributed.get_world_size()
        self._forward = Forward(
            scorer,
            self._processor,
            temperature=temperature,
            bans=bans,
            device=where,
            cache_bytes=int(vision.cache_gib * 2**30),
            call=self._engine,
            ranks_move_together=ds.zero_stage == 3 and self._world_size > 1,
        )
        self._actor, self._ds, self._loss, self._device = actor, ds, loss, where

    def logprobs(self, packs: Sequence[Pack], *, gradient: bool = False, adapter: bool = True) -> Scored:
        """(id, [T]) of each sample with an id of 0 or more, under the weights of now, and what it took.

        With `gradient` they come from the passes that an update makes, which change nothing. Without `adapter` they are
        those of the base: the reference of a policy that is nothing but an adapter on it.
        """
        with nullcontext() if adapter else adapters_off(self._net):
            return self._forward.logprobs(packs, gradient=gradient), self._forward.take_counts()

    def traits(self) -> tuple[float, bool]:
        """What a vision patch costs a pass, in language tokens; and whether layers carry state past a sample's end."""
        return patch_cost(self._net, self._processor), bool(self._net._is_stateful)

    def update(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        """Take one optimizer step per element of `work`; each is this rank's share of that step, pack by pack.

        Experiences line up with the samples of their packs. `totals` count what the step holds over all ranks, so the
        gradient does not depend on how the step was dealt out. Returns this rank's metrics of each step.

        Raises VlmrlError when the loss or the gradient is not a number.
        """
        metrics = []
        for packs, total in zip(work, totals, strict=True):
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
        shares = [
            self._backward(self._likelihood_loss(pack, total), pack, is_last=n == len(packs))
            for n, pack in enumerate(packs, start=1)
        ]
        return merge([*shares, self._step()])

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Everything that `load_checkpoint` needs to go on as if nothing had happened; `extra` is plain JSON."""
        save_state(self._engine, self._net, Path(folder), ds=self._ds, extra=extra, adapted=self._adapted)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint, random numbers included; returns its `extra`.

        Raises ConfigError when it is not a checkpoint of this model, these ranks and this ZeRO stage.
        """
        self._forward.forget()
        return load_state(self._engine, self._net, Path(folder), ds=self._ds, adapted=self._adapted)

    def save_model(self, folder: Path) -> None:
        """A folder that `from_pretrained` and vLLM load: weights in safetensors, config, tokenizer, processor.

        With an adapter, one that PEFT and vLLM load: the adapter alone.
        """
        if self._adapted is None:
            save_model(self._net, self._processor, Path(folder))
        else:
            save_adapter(self._net, self._adapted, Path(folder))

    def table(self) -> list[Any]:
        """(part of the model, trainable parameters, all parameters)."""
        return self._table

    def memory(self) -> dict[str, int]:
        """Most bytes that this rank has held: `host`, and `device` where there is one."""
        return peak_bytes()

    def sleep(self) -> None:
        """Move weights and optimizer state to CPU memory, for whoever shares the device; nothing where there is no GPU.

        Everything but `wake` has to wait until then, `bucket` included.
        """
        if self._can_move():
            self._engine.offload_states()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._can_move():
            self._engine.reload_states()

    def _can_move(self) -> bool:
        # Only DeepSpeed's sharding optimizers know how.
        return self._device.type == "cuda" and hasattr(self._engine.optimizer, "offload_states")

    def _policy_loss(self, pack: Pack, experience: Experience, total: Totals) -> tuple[Tensor, dict[str, Tensor]]:
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
        ratio = log_ratio(logprobs, old, sampled)
        surrogate = clipped_surrogate(
            ratio,
            self._placed(pack, experience.advantages, fill=0.0),
            clip_low=knobs.clip_low,
            clip_high=knobs.clip_high,
            dual_clip=knobs.dual_clip,
        )
        losses = surrogate.losses
        gap = torch.zeros_like(losses)
        if knobs.kl_coef > 0:
            assert experience.ref_logprobs is not None, "a KL in the loss needs the reference's log-probs"
            reference = torch.where(sampled, self._placed(pack, experience.ref_logprobs, fill=0.0), 0.0)
            gap = kl_to_reference(torch.where(sampled, logprobs, 0.0), reference, estimator=knobs.kl_estimator)
            losses = losses + knobs.kl_coef * gap
        share = reduce(
            losses,
            sampled,
            aggregation=knobs.aggregation,
            owner=owner,
            totals=total,
            max_new_tokens=knobs.max_new_tokens,
        )
        with torch.no_grad():
            sums = {
                "clipped": (surrogate.clipped & sampled).sum(),
                "entropy": torch.where(sampled, output.entropy.float(), 0.0).sum(),
                "kl_old": kl_to_reference(ratio, torch.zeros_like(ratio), estimator="k3").sum(),
                "kl_loss": torch.where(sampled, gap, 0.0).sum(),
                "ratio_max": torch.where(sampled, ratio.exp(), 0.0).amax(),
                "tokens": sampled.sum(),
            }
            if experience.old_logprobs is None:
                rollout = self._placed(pack, experience.rollout_logprobs, fill=0.0)
                sums |= _engine_gap(torch.where(sampled, old - rollout, 0.0).double())
        return share, sums

    def _likelihood_loss(self, pack: Pack, total: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        output = self._forward(pack)
        sampled = self._placed(pack, [s.sampled for s in pack.samples], fill=False)
        share = token_mean(-output.logprobs.float(), sampled, num_tokens=total.num_tokens)
        with torch.no_grad():
            entropy = torch.where(sampled, output.entropy.float(), 0.0).sum()
        return share, {"entropy": entropy, "tokens": sampled.sum()}

    def _backward(self, loss: tuple[Tensor, dict[str, Tensor]], pack: Pack, *, is_last: bool) -> dict[str, Metric]:
        """The backward pass of one pack, and what it tells. One transfer from the device, before the pass."""
        share, sums = loss
        numbers = torch.stack([share.detach().double(), *(value.double() for value in sums.values())]).tolist()
        found = dict(zip(["share", *sums], numbers, strict=True))
        if not math.isfinite(found["share"]):
            raise VlmrlError(f"the loss of optimizer step {self._number} is {found['share']}: {_HINT}")
        # DeepSpeed averages gradients over ranks, but the shares of the ranks add up to the loss.
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(share * self._world_size)
        return _as_metrics(found, pack, world_size=self._world_size)

    def _step(self) -> dict[str, Metric]:
        number, rate = self._number, float(self._engine.get_lr()[0])
        if is_plain(self._ds):
            norm = self._clipped_norm()
            if math.isfinite(norm):
                self._engine.step()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        # ZeRO reports a norm that is not a number as -1.
        if not math.isfinite(norm) or norm < 0:
            raise VlmrlError(f"the gradient of optimizer step {number} is not finite: {_HINT}")
        return {
            "policy/loss": Mean(0.0, 1.0),
            "policy/grad_norm": Mean(norm),
            "policy/lr": Mean(rate),
            **self._forward.take_counts(),
        }

    def _clipped_norm(self) -> float:
        """The norm before clipping."""
        trainable = [p for p in self._net.parameters() if p.requires_grad]
        bound = self._actor.max_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(trainable, bound))

    @property
    def _number(self) -> int:
        """Of the optimizer step in the making, from 1."""
        return int(self._engine.global_steps) + 1

    def _placed(self, pack: Pack, columns: Sequence[Any], *, fill: float | bool | int) -> Tensor:
        return place(pack, columns, fill).to(self._device, non_blocking=True)

    def _checkpoint_activations(self, *, reentrant: bool) -> None:
        self._net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            # Its backward starts from the inputs, which must want a gradient even below frozen layers.
            self._net.enable_input_require_grads()


def _adapt(net: Any, plan: AdapterPlan, actor: Model, ds: Ds) -> Adapted:
    """Put the adapter in, as new or as it was left."""
    if plan.has_magnitude and ds.load_in_4bit and ds.zero_stage == 3:
        # In each pass PEFT puts a new parameter in the place of the one that it dequantised, on CPU.
        raise ConfigError("ds.lora.use_dora on a base in 4 bits cannot be sharded: set ds.zero_stage to 0, 1 or 2")
    path = actor.model_name_or_path
    inject(net, plan)
    if actor.adapter_name_or_path is not None:
        flag, folder = "actor.adapter_name_or_path", actor.adapter_name_or_path
        stored = read_adapter(folder, flag=flag)
        check_base(stored, path, folder=folder, flag=flag)
        if stored.base.fingerprint is not None and stored.base.is_four_bit != ds.load_in_4bit:
            was = str(stored.base.is_four_bit).lower()
            raise ConfigError(f"{flag}: {folder} was trained with ds.load_in_4bit {was}: set it so here too")
        set_tensors(net, plan, stored, folder=folder)
    return Adapted(plan, Base(path=path, fingerprint=base_fingerprint(path), is_four_bit=ds.load_in_4bit))


_HINT = "lower --actor.adam.lr, or look for what is odd in the data of that step"


def _engine_gap(difference: Tensor) -> dict[str, Tensor]:
    """What `trainer.compare_engine` tells, as sums over a pack."""
    size = difference.abs()
    return {"gap_max": size.max(), "gap": size.sum(), "gap_kl": (torch.expm1(difference) - difference).sum()}


def _as_metrics(found: dict[str, float], pack: Pack, *, world_size: int) -> dict[str, Metric]:
    tokens = found["tokens"]
    rows, columns = pack.shape
    padding = rows * columns - pack.num_tokens
    metrics: dict[str, Metric] = {
        # Shares add up over packs and ranks. The mean is over ranks and steps: the step counts, its packs do not.
        "policy/loss": Mean(found["share"] * world_size, 0.0),
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
    if "clipped" in found:
        metrics |= {
            "policy/clip_fraction": Mean(found["clipped"], tokens),
            "policy/kl_old": Mean(found["kl_old"], tokens),
            "policy/kl_loss": Mean(found["kl_loss"], tokens),
            "policy/ratio_max": Max(found["ratio_max"]),
        }
    return metrics
