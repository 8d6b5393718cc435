"""Base of every trainable model: its DeepSpeed engine, backward passes that add up to a step, checkpoints, sleep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.algorithms.load_balance import load_balance_loss
from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.packing import FILLER, Pack, place
from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.learning.checkpoint import Adapted, load_state, save_state
from vlmrl.learning.checkpoint_checksums import find_damage
from vlmrl.learning.deepspeed_engine import (
    device,
    init_distributed,
    peak_bytes,
    release_memory,
    seed,
    sequence_group,
    sharded_loading,
    start_engine,
    uses_plain_optimizer,
)
from vlmrl.learning.ema import Ema
from vlmrl.learning.expert_shares import spread_experts
from vlmrl.learning.forward import ForwardOptions, ModelForward
from vlmrl.learning.optimizers import set_schedule_step
from vlmrl.models.adapter_files import Base, base_fingerprint, check_base, load_adapter_tensors, read_adapter
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.adapters import inject_adapter
from vlmrl.models.buffers import check_buffers
from vlmrl.models.experts import RouterLogits
from vlmrl.models.load import freeze, trainable_table
from vlmrl.models.sequence import check_sequence_parallel, sum_once
from vlmrl.observe.metrics import Mean, Metric
from vlmrl.plugins import Processor

PackLoss = tuple[Tensor, dict[str, Tensor]]
"""One pack's share of a step's loss, and sums over its sampled tokens by name."""

_SLEEPING = (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states)
"""State that only an optimizer step reads: the fp32 weights and the moments."""


class TrainableModel:
    """A trainable model, one per rank; call its collectives on all ranks, in the same order.

    A subclass passes a loader, calls `_start_engine`, computes losses and implements `_pack_metrics`.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT identify the rank; without them it is the only one.
    """

    _area: ClassVar[str]
    """Prefix of its metrics."""
    _section: ClassVar[str]
    """Section of its settings."""
    _forward: ModelForward
    _engine: Any
    _num_balanced: float
    """Packs of the step on all ranks that have more than fillers."""

    def __init__(
        self,
        load: Callable[[torch.device], tuple[PreTrainedModel, Processor]],
        *,
        model: Model,
        ds: Ds,
        loop: Loop,
        adapter: AdapterPlan | None,
    ) -> None:
        """`load` reads the model for a device. With an `adapter`, only the adapter trains."""
        init_distributed(loop.timeout_s)
        seed(loop.seed, deterministic=loop.full_determinism_enable)
        self._model, self._ds, self._device = model, ds, device()
        self._world_size = torch.distributed.get_world_size()
        self._sequence = sequence_group(ds.sequence_parallel_size, loop.timeout_s)
        self._average: Ema | None = None
        with sharded_loading(ds, offload=ds.offload != "none"):
            self._net, self._processor = load(self._device)
            # Some models draw random numbers while they load, how many depends on the stage. The adapter should not.
            seed(loop.seed, deterministic=loop.full_determinism_enable)
            if self._sequence is not None:
                check_sequence_parallel(self._net, self._sequence.size)
            freeze(self._net, self._processor, vision=model.freeze_visual_encoder, projector=model.freeze_projector)
            if ds.expert_parallel_size > 1:
                spread_experts(self._net, ds.expert_parallel_size)
            self._adapted = None if adapter is None else _adapt(self._net, adapter, model, ds)

    def _start_engine(self, module: nn.Module, *, total_steps: int, vision: Vision) -> ForwardOptions:
        """Start the engine around `module`, which wraps the model. Return the options of its forward passes.

        `total_steps` is the number of optimizer steps of the whole run. Raises VlmrlError when a buffer of the model
        differs from what the model's code computes.
        """
        self._table = trainable_table(self._net, self._processor)
        self._total_steps = total_steps
        self._router_logits = RouterLogits(self._net, self._sequence) if self._model.aux_loss_coef else None
        if self._model.gradient_checkpointing_enable:
            self._checkpoint_activations(reentrant=self._model.gradient_checkpointing_reentrant)
        self._engine = start_engine(module.train(), actor=self._model, ds=self._ds, total_steps=total_steps)
        check_buffers(self._net)
        self._put_to_sleep()
        return {
            "device": self._device,
            "cache_bytes": int(vision.cache_gib * 2**30),
            "call": self._engine,
            "ranks_in_lockstep": self._ds.zero_stage == 3 and self._world_size > 1,
        }

    def table(self) -> list[Any]:
        """Rows (part of the model, trainable parameters, all parameters)."""
        return self._table

    def memory(self) -> dict[str, int]:
        """Peak memory of this rank, in bytes: `host`, and `device` if there is one."""
        return peak_bytes()

    def release(self) -> None:
        """Free the memory that PyTorch caches on the device, for the engines that share it."""
        release_memory()

    @contextmanager
    def _optimizer_awake(self) -> Iterator[None]:
        """Keep the optimizer's state on the device within the context. With `ds.enable_sleep` it is in main memory
        otherwise.

        Weights stay on the device: passes and weight syncs need them. Does nothing on CPU.
        """
        if self._sleeps:
            self._engine.reload_states()
        yield
        self._put_to_sleep()

    def _put_to_sleep(self) -> None:
        if self._sleeps:
            self._engine.offload_states(include=_SLEEPING)

    def _save_state(self, folder: Path, extra: dict[str, Any]) -> None:
        with self._optimizer_awake():
            save_state(
                self._engine,
                self._net,
                Path(folder),
                ds=self._ds,
                optim=self._optim,
                extra=extra,
                adapted=self._adapted,
                average=self._average,
            )

    def _load_state(self, folder: Path) -> dict[str, Any]:
        self._forward.clear_cache()
        with self._optimizer_awake():
            return load_state(
                self._engine,
                self._net,
                Path(folder),
                ds=self._ds,
                optim=self._optim,
                adapted=self._adapted,
                average=self._average,
            )

    def set_progress(self, share: float) -> None:
        """Set the learning rate to that of a run at this `share`, from 0 to 1. A resumed run may take other steps than
        the checkpoint has counted."""
        self._set_progress((share, share))

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """Verify this rank's files of a checkpoint; returns `name: reason` for each that is damaged. Not a collective.
        Together, the ranks verify every file once."""
        rank = torch.distributed.get_rank()
        return find_damage(Path(folder), rank=rank, num_ranks=self._world_size)

    @property
    def _optim(self) -> dict[str, str]:
        return {f"{self._section}.optim": self._model.optim}

    def _pack_metrics(self, sums: dict[str, float], pack: Pack) -> dict[str, Metric]:
        """Metrics of a pack, from the sums of its `PackLoss` and its `share` of the loss."""
        raise NotImplementedError

    def _backward(self, loss: PackLoss, pack: Pack, *, number: int, of: Sequence[Pack]) -> dict[str, Metric]:
        """Run the backward pass of pack `number` (from 1) `of` this rank's in the step; returns its metrics. Transfers
        from the device once, before the pass. With a load balance loss, the first of a step is a collective.

        Raises VlmrlError when the loss is not finite.
        """
        share, sums = loss
        balance = self._load_balance(pack)
        if balance is not None:
            sums = sums | {"aux_loss": balance.detach(), "balanced": torch.tensor(_has_data(pack), device=self._device)}
        numbers = torch.stack([share.detach().double(), *(value.double() for value in sums.values())]).tolist()
        values = dict(zip(["share", *sums], numbers, strict=True))
        if not math.isfinite(values["share"]):
            raise VlmrlError(f"the loss of optimizer step {self._step_number} is {values['share']}: {self._hint}")
        # DeepSpeed averages gradients over ranks, but the shares of the ranks add up to the loss.
        self._engine.set_gradient_accumulation_boundary(number == len(of))
        total = share * self._world_size
        if balance is not None:
            # Not a sum over tokens: the loss of a pack, of which the mean is taken over packs and groups of ranks,
            # without packs of fillers.
            if number == 1:
                self._num_balanced = self._sum_over_ranks([sum(map(_has_data, of))])[0]
            weight = self._world_size * self._ds.sequence_parallel_size / max(self._num_balanced, 1.0)
            total = total + self._model.aux_loss_coef * weight * balance
        self._engine.backward(total)
        # Shares add up over packs and groups of ranks with the same packs, of which one rank each reports. The mean is
        # over groups and steps, so `_step` adds the weight, once.
        num_groups = self._world_size // self._ds.sequence_parallel_size
        return {f"{self._area}/loss": Mean(values["share"] * num_groups, 0.0), **self._pack_metrics(values, pack)}

    def _load_balance(self, pack: Pack) -> Tensor | None:
        """The auxiliary loss of the last pass, over tokens that are no filler's; None without experts to balance."""
        if self._router_logits is None:
            return None
        marks = [np.full(len(s.tokens), i != FILLER) for i, s in zip(pack.ids, pack.samples, strict=True)]
        is_token = self._place(pack, marks, fill=False)
        logits, is_token = self._router_logits.take(is_token)
        add_up = None if self._sequence is None else partial(sum_once, group=self._sequence)
        return load_balance_loss(logits, is_token, top_k=self._router_logits.top_k, add_up=add_up)

    def _set_progress(self, span: tuple[float, float] | None) -> None:
        """Set the learning rate of the next optimizer step from the run's progress, from 0 to 1, if it is known."""
        if span is not None:
            set_schedule_step(self._engine.lr_scheduler, span[0] * self._total_steps)

    def _step(self) -> dict[str, Metric]:
        """Take an optimizer step and return its metrics. Raises VlmrlError when the gradient is not finite."""
        number, rate = self._step_number, float(self._engine.get_lr()[0])
        if uses_plain_optimizer(self._ds):
            norm = self._clipped_norm()
            if math.isfinite(norm):
                self._engine.step()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        # ZeRO reports a norm that is not a number as -1.
        if not math.isfinite(norm) or norm < 0:
            raise VlmrlError(f"the gradient of optimizer step {number} is not finite: {self._hint}")
        if self._average is not None:
            self._average.update()
        return {
            f"{self._area}/loss": Mean(0.0, 1.0),
            f"{self._area}/grad_norm": Mean(norm),
            f"{self._area}/lr": Mean(rate),
            **self._forward.take_counts(),
        }

    def _sum_over_ranks(self, numbers: Sequence[float]) -> list[float]:
        """Sum over ranks. A collective: every rank gets the same sums, to the last bit."""
        total = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums

    def _place(self, pack: Pack, columns: Sequence[Any], *, fill: float | bool | int) -> Tensor:
        return place(pack, columns, fill).to(self._device, non_blocking=True)

    def _clipped_norm(self) -> float:
        """Clip the gradient; returns its norm before clipping."""
        trainable = [p for p in self._net.parameters() if p.requires_grad]
        # As in `engine_config`: Muon's steps are not clipped.
        bound = math.inf if self._model.optim == "muon" else self._model.max_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(trainable, bound))

    @property
    def _sleeps(self) -> bool:
        return self._ds.enable_sleep and self._device.type == "cuda"

    def _checkpoint_activations(self, *, reentrant: bool) -> None:
        self._net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            # Reentrant checkpointing needs inputs that require a gradient, even below frozen layers.
            self._net.enable_input_require_grads()

    @property
    def _step_number(self) -> int:
        """Number of the next optimizer step, from 1."""
        return int(self._engine.global_steps) + 1

    @property
    def _hint(self) -> str:
        return f"lower --{self._section}.adam.lr, or look for bad rows in the data of that step"


def _has_data(pack: Pack) -> bool:
    """Whether a pack has more than fillers."""
    return any(i != FILLER for i in pack.ids)


def _adapt(net: PreTrainedModel, plan: AdapterPlan, model: Model, ds: Ds) -> Adapted:
    """Add the adapter to the model: a new one, or that of `actor.adapter_name_or_path`."""
    if plan.has_magnitude and ds.load_in_4bit and ds.zero_stage == 3:
        # In each pass, on CPU, PEFT replaces the dequantized parameter with a new one, which ZeRO-3 does not know.
        raise ConfigError("ds.lora.use_dora on a 4-bit base cannot be sharded: set ds.zero_stage to 0, 1 or 2")
    path = model.model_name_or_path
    inject_adapter(net, plan)
    if model.adapter_name_or_path is not None:
        flag, folder = "actor.adapter_name_or_path", model.adapter_name_or_path
        stored = read_adapter(folder, flag=flag)
        check_base(stored, path, folder=folder, flag=flag)
        if stored.base.fingerprint is not None and stored.base.is_four_bit != ds.load_in_4bit:
            was = str(stored.base.is_four_bit).lower()
            raise ConfigError(f"{flag}: {folder} was trained with ds.load_in_4bit {was}: set it so here too")
        load_adapter_tensors(net, plan, stored, folder=folder)
    return Adapted(plan, Base(path=path, fingerprint=base_fingerprint(path), is_four_bit=ds.load_in_4bit))
