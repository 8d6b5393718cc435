"""Mixtures of experts: which modules choose the experts of a token, and the kernel that applies them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from vlmrl.errors import ConfigError
from vlmrl.models.expert_settings import NO_EXPERTS
from vlmrl.models.kind import EXPERT_COUNTS
from vlmrl.models.sequence import SequenceGroup, SequenceShard

Implementation = Literal["auto", "eager", "batched_mm", "grouped_mm"]


def routers(net: nn.Module) -> list[nn.Module]:
    """Return the modules that choose experts, in the order of the layers: those whose logits Transformers records."""
    return [module for module, _ in _recorded(net, "", [])]


def _recorded(module: nn.Module, name: str, recorders: list[OutputRecorder]) -> list[tuple[nn.Module, int]]:
    """Return the modules whose logits Transformers records, each with their place in a tuple of outputs.

    `name` and `recorders` are those of the model around `module`, whose parts may be models with recorders of their
    own. The rules are those of `transformers.utils.output_capturing`.
    """
    if isinstance(module, PreTrainedModel):
        given: Any = (module._can_record_outputs or {}).get("router_logits") or []
        recorders = [_recorder(spec) for spec in (given if isinstance(given, list) else [given])]
    own = [(module, recorder.index) for recorder in recorders if _is_recorded(recorder, module, name)]
    for key, part in module.named_children():
        own += _recorded(part, f"{name}.{key}", recorders)
    return own


def _recorder(spec: Any) -> OutputRecorder:
    if isinstance(spec, OutputRecorder):
        return spec
    kind, name = (None, spec) if isinstance(spec, str) else (spec, None)
    return OutputRecorder(kind, index=1, class_name=name)


def _is_recorded(recorder: OutputRecorder, module: nn.Module, name: str) -> bool:
    is_kind = recorder.target_class is not None and isinstance(module, recorder.target_class)
    if not is_kind and (recorder.class_name is None or not name.endswith(recorder.class_name)):
        return False
    return recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f"{name}."


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
        """`sequence`: ranks that share the tokens of every pass. Raises ConfigError when the model has no experts,
        or its configuration does not say how many."""
        found = _recorded(net, "", [])
        if not found:
            raise ConfigError(NO_EXPERTS.format("actor.aux_loss_coef"))
        text = net.config.get_text_config()
        self._num_experts = next((getattr(text, key) for key in EXPERT_COUNTS if getattr(text, key, None)), None)
        top_k = getattr(text, "num_experts_per_tok", None)
        if self._num_experts is None or top_k is None:
            missing = "no num_experts_per_tok" if self._num_experts else f"none of {', '.join(EXPERT_COUNTS)}"
            raise ConfigError(f"actor.aux_loss_coef: {text.model_type}'s configuration has {missing}: leave it out")
        if any(name.endswith("e_score_correction_bias") for name, _ in net.named_buffers()):
            raise ConfigError(
                f"actor.aux_loss_coef: {text.model_type} evens its experts by a bias instead: leave it out"
            )
        self.top_k = int(top_k)
        self._sequence = sequence
        self._logits: list[Tensor] = []
        self._shape = (0, 0)
        self._is_recording = False
        net.base_model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for router, index in found:
            router.register_forward_hook(partial(self._record, index))

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

    def _record(self, index: int, router: nn.Module, args: Any, output: Any) -> None:
        """Raises ConfigError when the output is no logits of the model's experts."""
        # Not when a checkpointed layer is computed again in the backward pass, after `take`.
        del args
        if not self._is_recording or not torch.is_grad_enabled():
            return
        logits = output[index] if isinstance(output, tuple) else output
        is_tensor = isinstance(logits, Tensor) and logits.is_floating_point()
        if not is_tensor or logits.shape[-1] != self._num_experts:
            raise ConfigError(
                f"actor.aux_loss_coef: the routers of this model ({type(router).__name__}) give no logits of its "
                f"{self._num_experts} experts: leave it out"
            )
        self._logits.append(logits)
