"""What moves the weights: the optimizer, what it does to which of them, and its learning rate over the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vlmrl.config.actor import Model
from vlmrl.errors import ConfigError
from vlmrl.models.quantize import true_shape

_OF_BITSANDBYTES = {
    "adam_8bit": "AdamW8bit",
    "adam_paged": "PagedAdamW32bit",
    "adam_8bit_paged": "PagedAdamW8bit",
}
"""`actor.optim` -> class of bitsandbytes. Moments in 8 bits (arXiv:2110.02861), or paged: CUDA moves them to CPU memory
when the device is full (arXiv:2305.14314)."""


def optimizer(module: nn.Module, *, actor: Model, where: torch.device) -> torch.optim.Optimizer:
    """The optimizer that `actor.optim` names, of the parameters that want a gradient.

    Raises ConfigError for one that the device does not have, or that has nothing to move.
    """
    if actor.optim == "muon":
        return _muon(module, actor=actor, where=where)
    groups = parameter_groups(module, weight_decay=actor.adam.weight_decay)
    how: dict[str, Any] = {"lr": actor.adam.lr, "betas": actor.adam.betas, "eps": actor.adam.eps}
    if actor.optim == "adam":
        # One pass over the numbers: 33 ms instead of 67 for 13M of them on two cores.
        return torch.optim.AdamW(groups, **how, fused=True)
    if where.type != "cuda":
        raise ConfigError(f"optim {actor.optim} is one of bitsandbytes', which needs CUDA: use adam")
    import bitsandbytes

    found: torch.optim.Optimizer = getattr(bitsandbytes.optim, _OF_BITSANDBYTES[actor.optim])(groups, **how)
    return found


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The matrices inside the layers that train: what Muon is defined for. Of the Hugging Face model in `module`,
    neither embeddings nor output layer, neither vectors nor the filters of the patches."""
    from transformers import PreTrainedModel

    net = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    tables = {id(part.weight) for part in net.modules() if isinstance(part, nn.Embedding)}
    # What is not in the base model is an output layer, be it of log-probabilities or of values.
    inside: nn.Module = net.base_model
    return [p for p in inside.parameters() if p.requires_grad and len(true_shape(p)) == 2 and id(p) not in tables]


def _muon(module: nn.Module, *, actor: Model, where: torch.device) -> torch.optim.Optimizer:
    """DeepSpeed's Muon, with AdamW inside for all that Muon is not for.

    Its iterations run in fp16: the last bit of a gradient shows in the third digit of a step.
    """
    if where.type != "cuda":
        # It would compile its kernels, which takes long and a compiler that may not be there.
        torch.compiler.set_stance("force_eager")
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices = hidden_matrices(module)
    if not matrices:
        raise ConfigError("optim muon moves the matrices inside the layers, and none of them trains: use adam")
    moved = {id(p) for p in matrices}
    for parameter in module.parameters():
        # By this name DeepSpeed asks for it.
        parameter.use_muon = id(parameter) in moved  # type: ignore[attr-defined]
    adam, decay = actor.adam, actor.adam.weight_decay
    by_muon = {"use_muon": True, "lr": actor.muon.lr, "momentum": actor.muon.momentum, "weight_decay": decay}
    by_adam = {"use_muon": False, "lr": adam.lr, "betas": adam.betas, "eps": adam.eps}
    groups: list[dict[str, Any]] = [by_muon | {"params": matrices}]
    for group in parameter_groups(module, weight_decay=decay):
        if rest := [p for p in group["params"] if id(p) not in moved]:
            groups.append(group | by_adam | {"params": rest})
    found: torch.optim.Optimizer = MuonWithAuxAdam(groups)
    return found


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters; biases and norms, which have one dimension, are not decayed."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trainable if len(true_shape(p)) > 1]
    vectors = [p for p in trainable if len(true_shape(p)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def schedule(optimizer: torch.optim.Optimizer, *, actor: Model, total_steps: int) -> Any:
    """The learning rate over the run: a linear rise over the warm-up's share of it, then `actor.lr_scheduler`.

    The share is rounded down, so that a run of a few steps has no warm-up: its first step would have a rate of 0.
    """
    # This imports bitsandbytes, which warns of nothing that matters unless `models.quantize` has come first.
    from transformers import get_scheduler

    has_floor = actor.lr_scheduler == "cosine_with_min_lr"
    return get_scheduler(
        actor.lr_scheduler,
        optimizer,
        num_warmup_steps=int(actor.lr_warmup_ratio * total_steps),
        num_training_steps=total_steps,
        scheduler_specific_kwargs={"min_lr_rate": actor.min_lr_ratio} if has_floor else None,
    )


def move_schedule(scheduler: Any, step: float) -> None:
    """Give the optimizer the learning rates of this optimizer step, whole or not, of those that a schedule spans.

    The schedule goes on from there. For runs that do not know beforehand how many steps they take.
    """
    scheduler.last_epoch = step
    groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, rate, share in groups:
        group["lr"] = rate * share(step)
