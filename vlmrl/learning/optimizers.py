"""Optimizers, their parameter groups, and the learning rate over a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vlmrl.config.actor import Model
from vlmrl.errors import ConfigError
from vlmrl.learning.expert_shares import optimizer_keys
from vlmrl.models.expert_parallel import is_shared
from vlmrl.models.quantize import true_shape

_BITSANDBYTES = {
    "adam_8bit": "AdamW8bit",
    "adam_paged": "PagedAdamW32bit",
    "adam_8bit_paged": "PagedAdamW8bit",
}
"""`actor.optim` -> class of bitsandbytes. Moments in 8 bits (arXiv:2110.02861), or paged: CUDA moves them to main
memory when the device is full (arXiv:2305.14314)."""


def make_optimizer(module: nn.Module, *, actor: Model, where: torch.device) -> torch.optim.Optimizer:
    """Make the optimizer `actor.optim` for the parameters that require a gradient.

    Raises ConfigError when it does not run on this device, or has no parameter to update.
    """
    if actor.optim == "muon":
        return _muon(module, actor=actor, where=where)
    groups = parameter_groups(module, weight_decay=actor.adam.weight_decay)
    options: dict[str, Any] = {"lr": actor.adam.lr, "betas": actor.adam.betas, "eps": actor.adam.eps}
    if actor.optim == "adam":
        # Fused makes one pass over the elements: 33 ms instead of 67 for 13M of them on two cores.
        return torch.optim.AdamW(groups, **options, fused=True)
    if where.type != "cuda":
        raise ConfigError(f"optim {actor.optim} is an optimizer of bitsandbytes, which needs CUDA: use adam")
    import bitsandbytes

    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, _BITSANDBYTES[actor.optim])(groups, **options)
    return optimizer


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices inside the layers, which Muon is defined for.

    Without embeddings, output layer, vectors and patch filters of the Hugging Face model in `module`.
    """
    from transformers import PreTrainedModel

    net = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    tables = {id(part.weight) for part in net.modules() if isinstance(part, nn.Embedding)}
    # Outside the base model there is only the output layer, of logits or of values.
    inside: nn.Module = net.base_model
    return [p for p in inside.parameters() if p.requires_grad and len(true_shape(p)) == 2 and id(p) not in tables]


def _muon(module: nn.Module, *, actor: Model, where: torch.device) -> torch.optim.Optimizer:
    """Make DeepSpeed's Muon, with AdamW for all parameters but `hidden_matrices`.

    Its iterations run in fp16: the last bit of a gradient changes the third digit of a step.
    """
    if where.type != "cuda":
        # Muon would compile its kernels, which takes long and needs a compiler.
        torch.compiler.set_stance("force_eager")
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices = hidden_matrices(module)
    if not matrices:
        raise ConfigError("optim muon updates the matrices inside the layers, and none of them trains: use adam")
    matrix_ids = {id(p) for p in matrices}
    for parameter in module.parameters():
        # DeepSpeed reads this attribute.
        parameter.use_muon = id(parameter) in matrix_ids  # type: ignore[attr-defined]
    adam, decay = actor.adam, actor.adam.weight_decay
    by_muon = {"use_muon": True, "lr": actor.muon.lr, "momentum": actor.muon.momentum, "weight_decay": decay}
    by_adam = {"use_muon": False, "lr": adam.lr, "betas": adam.betas, "eps": adam.eps}
    groups: list[dict[str, Any]] = [by_muon | {"params": matrices}]
    for group in parameter_groups(module, weight_decay=decay):
        if rest := [p for p in group["params"] if id(p) not in matrix_ids]:
            groups.append(group | by_adam | {"params": rest})
    optimizer: torch.optim.Optimizer = MuonWithAuxAdam(groups)
    return optimizer


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Group the trainable parameters: no weight decay for biases and norms, which have one dimension; experts that are
    spread over the ranks by themselves."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
        for experts in (False, True):
            params = [p for p in trainable if (len(true_shape(p)) > 1) == is_matrix and is_shared(p) == experts]
            if params:
                groups.append({"params": params, "weight_decay": decay, **optimizer_keys(params[0])})
    return groups


def make_schedule(optimizer: torch.optim.Optimizer, *, actor: Model, total_steps: int) -> Any:
    """Make the schedule of the learning rate: a linear warm-up, then `actor.lr_scheduler`.

    The number of warm-up steps is rounded down, so that a run of a few steps has none: its first rate would be 0.
    """
    # This imports bitsandbytes, which logs an irrelevant warning unless `models.quantize` was imported before.
    from transformers import get_scheduler

    has_floor = actor.lr_scheduler == "cosine_with_min_lr"
    return get_scheduler(
        actor.lr_scheduler,
        optimizer,
        num_warmup_steps=int(actor.lr_warmup_ratio * total_steps),
        num_training_steps=total_steps,
        scheduler_specific_kwargs={"min_lr_rate": actor.min_lr_ratio} if has_floor else None,
    )


def set_schedule_step(scheduler: Any, step: float) -> None:
    """Move the schedule to an optimizer step, which may be fractional, and set the learning rates of that step.

    The schedule continues from there. For runs whose number of steps is not known in advance.
    """
    scheduler.last_epoch = step
    groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, rate, factor in groups:
        group["lr"] = rate * factor(step)
