"""What settings say about each other: which contradict, and which the run would never read.

Each function answers for the sections that it is given, and names settings in full: that is how a message finds back to
the flag or the line of YAML that a setting came from.
"""

from collections.abc import Iterable
from typing import Literal, get_origin

from vlmrl.config.actor import Model
from vlmrl.config.base import ConflictError, Section, Unread
from vlmrl.config.ckpt import Ckpt, Logger
from vlmrl.config.data import Columns, Data
from vlmrl.config.ds import Ds
from vlmrl.config.names import is_given, named_in, settings, value
from vlmrl.config.optimizer import Muon, Optimized
from vlmrl.config.rollout import Eval, Held
from vlmrl.config.train import Layout, Loop


def refuse(config: Section, *, conflicts: Iterable[str], unread: Unread) -> None:
    """Raise all of it at once: contradictions, and settings that were given but would not be read.

    A value that means "off" (`eval.steps -1`) is what the run does anyway, and what the user has switched off by hand
    (`algo.kl.init_coef 0`) may keep its settings (`ref.num_gpus_per_node 8`): neither is a mistake.
    """
    dead = [
        f"{name} would not be read: {reason}"
        for name, reason in unread.items()
        if is_given(config, name) and not _is_off(config, name) and not _is_switched_off(config, reason)
    ]
    lines = [*conflicts, *dead]
    if lines:
        raise ConflictError(lines)


def _is_off(config: Section, name: str) -> bool:
    """Whether a setting says no to what it is about: false, none, 0, or -1 as a number of steps."""
    given, kind = value(config, name), settings(type(config))[name].annotation
    # The 0 of `ds.zero_stage` is a choice like its others.
    return given is None or (get_origin(kind) is not Literal and isinstance(given, int | float) and given in (0, -1))


def _is_switched_off(config: Section, reason: str) -> bool:
    """Whether the reason names a setting that the user has switched off, and not only left at its default."""
    return any(is_given(config, name) and _is_off(config, name) for name in named_in(reason, settings(type(config))))


def unread_of_optimized(role: str, optimized: Optimized) -> Unread:
    """Of the optimizer of the actor or of the critic."""
    unread: Unread = {}
    if optimized.lr_scheduler != "cosine_with_min_lr":
        unread[f"{role}.min_lr_ratio"] = f"{role}.lr_scheduler cosine_with_min_lr alone has a floor"
    if optimized.lr_scheduler == "constant":
        reason = f"{role}.lr_scheduler constant does not warm up (constant_with_warmup does)"
        unread[f"{role}.lr_warmup_ratio"] = reason
    if optimized.optim != "muon":
        unread |= dict.fromkeys(settings(Muon, f"{role}.muon."), f"{role}.optim is {optimized.optim}")
    else:
        unread[f"{role}.max_norm"] = f"{role}.optim muon takes steps of one size, whatever the gradient's norm"
    return unread


def unread_of_model(model: Model) -> Unread:
    unread = unread_of_optimized("actor", model)
    if not model.gradient_checkpointing_enable:
        unread["actor.gradient_checkpointing_reentrant"] = "actor.gradient_checkpointing_enable is off"
    return unread


def unread_of_columns(columns: Columns) -> Unread:
    if not columns.apply_chat_template:
        return {}
    return {"data.input_template": "data.apply_chat_template is on, and the model's chat template takes its place"}


def unread_of_eval(evaluation: Eval, *, holds_out: bool) -> Unread:
    """`holds_out`: rows of the training data are evaluated."""
    if evaluation.dataset is not None:
        return {}
    if holds_out:
        return {"eval.split": "data.eval_fraction holds rows of data.prompt_split out, and there is no eval.dataset"}
    names = [name for name in settings(Eval, "eval.") if name != "eval.dataset"]
    return dict.fromkeys(names, "nothing is evaluated without eval.dataset or data.eval_fraction")


def conflicts_of_eval(evaluation: Held, *, evaluates: bool = True) -> list[str]:
    n = evaluation.n_samples_per_prompt
    if not evaluates or evaluation.temperature > 0 or n == 1:
        return []
    return [f"eval.temperature 0 gives {n} times the same response: set eval.n_samples_per_prompt to 1, or raise it"]


def unread_of_output(ckpt: Ckpt, logger: Logger) -> Unread:
    unread: Unread = {}
    if ckpt.save_steps == -1 and not ckpt.saves_on_stop:
        unread["ckpt.max_num"] = "no checkpoint is written while ckpt.save_steps is -1"
    if logger.wandb.project is None:
        names = ("logger.wandb.org", "logger.wandb.group", "logger.wandb.run_name")
        unread |= dict.fromkeys(names, "W&B is off without logger.wandb.project")
    return unread


def unread_of_vision(model: Model, *, reached_by_adapters: bool | None, has_frozen_tower_beside: bool) -> Unread:
    """`reached_by_adapters` is None where there are none, and the model itself trains."""
    if has_frozen_tower_beside or reached_by_adapters is False:
        return {}
    if reached_by_adapters:
        return {"vision.cache_gib": "ds.lora.target_modules reach the tower, so what it makes changes"}
    if model.freeze_visual_encoder and model.freeze_projector:
        return {}
    reason = "actor.freeze_visual_encoder and actor.freeze_projector are not both on, so what the tower makes changes"
    return {"vision.cache_gib": reason}


def unread_of_ds(ds: Ds) -> Unread:
    return {} if ds.zero_stage else {"ds.overlap_comm": "ds.zero_stage 0 communicates once, after the backward pass"}


def conflicts_of_ds(ds: Ds, train: Loop) -> list[str]:
    conflicts = []
    if ds.adam_offload and ds.zero_stage == 0:
        conflicts.append("ds.adam_offload needs a sharded optimizer: set ds.zero_stage to 1, 2 or 3")
    packs = train.layout != "padded"
    if is_given(train, "layout") and ds.packing_samples not in (None, packs):
        flag, meant = str(ds.packing_samples).lower(), layout(not packs)
        conflicts.append(
            f"ds.packing_samples {flag} means train.layout {meant}, and it is {train.layout}: give one of them"
        )
    if train.layout == "shared" and ds.packing_samples is not False and ds.attn_implementation in ("sdpa", "eager"):
        conflicts.append(
            f"ds.attn_implementation {ds.attn_implementation} does not know of prompts that responses share: set "
            "train.layout packed or padded, or ds.attn_implementation auto"
        )
    return conflicts


def conflicts_of_optimizer(role: str, optimized: Optimized, ds: Ds) -> list[str]:
    """Of the actor's or of the critic's."""
    conflicts = []
    if ds.adam_offload and optimized.optim != "adam":
        conflicts.append(
            f"ds.adam_offload moves the state of PyTorch's AdamW to CPU memory, and {role}.optim {optimized.optim} has "
            "one of its own: leave one of them out"
        )
    return conflicts


def conflicts_of_data(data: Data) -> list[str]:
    if data.prompt_probs is None:
        return []
    num_datasets = sum(bool(part.strip()) for part in data.prompt_dataset.split(","))
    if len(data.prompt_probs) == num_datasets:
        return []
    return [f"data.prompt_probs has {len(data.prompt_probs)} shares for the {num_datasets} of data.prompt_dataset"]


def layout(packing_samples: bool) -> Layout:
    """What OpenRLHF's `ds.packing_samples` says in `train.layout`."""
    return "shared" if packing_samples else "padded"
