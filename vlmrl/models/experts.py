"""Mixtures of experts: which modules choose the experts of a token, and the kernel that applies them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from vlmrl.errors import ConfigError
from vlmrl.models.expert_settings import NO_EXPERTS
from vlmrl.models.sequence import SequenceGroup, SequenceShard

Implementation = Literal["auto", "eager", "batched_mm", "grouped_mm"]


def routers(net: nn.Module) -> list[nn.Module]:
    """Return the modules that choose experts, in the order of the layers: those whose logits Transformers records."""
    kinds: set[type] = set()
    for module in net.modules():
        if isinstance(module, PreTrainedModel):
            recorder: Any = (module._can_record_outputs or {}).get("router_logits")
            if isinstance(recorder, OutputRecorder):
                kinds.add(recorder.target_class)
    return [module for module in net.modules() if type(module) in kinds]


@contextmanager
def plain_experts(net: nn.Module) -> Iterator[None]:
    """Context in which experts are applied one after the other by matrix products of any type.

    Transformers' default, `torch.nn.functional.grouped_mm`, has no kernel for fp64.
    """
    models = [module for module in net.modules() if isinstance(module, PreTrainedModel)]
    before = [(model.config, model.config._experts_implementation) for model in models] if routers(net) else []
    for config, _ in before:
        config._experts_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation_internal = implementation


def use_experts(net: PreTrainedModel, implementation: Implementation) -> None:
    """Choose the kernel that applies the experts of a model, if it has any; `auto` is Transformers' choice."""
    if implementation != "auto" and routers(net):
        net.set_experts_implementation(implementation)


class RouterLogits:
    """The logits of all routers in the model's last pass with a gradient."""

    def __init__(self, net: PreTrainedModel, sequence: SequenceGroup | None = None) -> None:
        """`sequence`: ranks that share the tokens of every pass. Raises ConfigError when the model has no experts."""
        found = routers(net)
        if not found:
            raise ConfigError(NO_EXPERTS.format("actor.aux_loss_coef"))
        self.top_k = int(net.config.get_text_config().num_experts_per_tok)
        self._sequence = sequence
        self._logits: list[Tensor] = []
        self._shape = (0, 0)
        self._is_recording = False
        net.base_model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for router in found:
            router.register_forward_hook(self._record)

    def take(self, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [L, N, E], and `is_token` [B, T] for the same N positions: the model may have seen more
        rows and columns than it has, all of them padding. With a sequence group, the positions of this rank."""
        logits = torch.stack([rows.flatten(0, -2) for rows in self._logits])
        mask = torch.zeros(self._shape, dtype=torch.bool, device=logits.device)
        mask[: is_token.shape[0], : is_token.shape[1]] = is_token
        if self._sequence is not None:
            mask = SequenceShard(self._sequence, mask.shape[1]).take(mask, 1)
        self._logits, self._is_recording = [], False
        return logits, mask.flatten()

    def _begin(self, body: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        del body, args
        if torch.is_grad_enabled():
            self._logits, self._is_recording = [], True
            self._shape = tuple(inputs["input_ids"].shape)

    def _record(self, router: nn.Module, args: Any, output: Any) -> None:
        # Not when a checkpointed layer is computed again in the backward pass, after `take`.
        del router, args
        if self._is_recording and torch.is_grad_enabled():
            self._logits.append(output[0] if isinstance(output, tuple) else output)
