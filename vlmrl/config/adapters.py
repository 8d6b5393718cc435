"""Checks of adapters and 4-bit weights against the other settings, and which parts of the model adapters change."""

from vlmrl.config.actor import Model
from vlmrl.config.base import Unread
from vlmrl.config.ds import Ds, conflicts_of_optimizer
from vlmrl.config.lora import MAX_RANK, Lora
from vlmrl.config.names import settings
from vlmrl.config.vllm import Vllm


def unread_of_adapters(ds: Ds) -> Unread:
    unread: Unread = {}
    if ds.lora.rank == 0:
        names = [name for name in settings(Lora, "ds.lora.") if name != "ds.lora.rank"]
        reason = "ds.lora.rank is 0, so there are no adapters"
        unread |= dict.fromkeys((*names, "actor.adapter_name_or_path"), reason)
    if not ds.load_in_4bit:
        unread["ds.quant_storage"] = "ds.load_in_4bit is off"
    return unread


def unread_of_engine_base(vllm: Vllm, ds: Ds) -> Unread:
    """`vllm.qlora_base` needs 4-bit weights in the trainer, and adapters that are sent without the base."""
    if not ds.load_in_4bit:
        return {"vllm.qlora_base": "ds.load_in_4bit is off, so engines and trainer have the same base"}
    merged = reason_to_merge(ds.lora)
    return {} if merged is None else {"vllm.qlora_base": f"{merged} makes the engines hold merged weights"}


def unread_of_adapter_reference() -> Unread:
    """For runs whose reference is the actor with its adapters off."""
    reason = "the reference is the actor with its adapters off, unless ref.model_name_or_path names another"
    return dict.fromkeys(("ref.num_nodes", "ref.num_gpus_per_node", "train.colocate_actor_ref"), reason)


def conflicts_of_adapters(model: Model, ds: Ds) -> list[str]:
    lora, conflicts = ds.lora, []
    if ds.load_in_4bit and lora.rank == 0:
        conflicts.append("ds.load_in_4bit freezes the base, which leaves nothing to train: set ds.lora.rank above 0")
    if lora.rank > MAX_RANK:
        conflicts.append(f"ds.lora.rank {lora.rank} is above {MAX_RANK}, the largest that vLLM serves: lower it")
    if "vision" in lora.target_modules:
        frozen = [flag for flag in ("freeze_visual_encoder", "freeze_projector") if getattr(model, flag)]
        conflicts += [
            f"ds.lora.target_modules vision would change what actor.{flag} freezes: leave one of them out"
            for flag in frozen
        ]
    conflicts += conflicts_of_optimizer("actor", model, ds)
    return [*conflicts, *conflicts_of_storage(ds, flag="ds.zero_stage", stage=ds.zero_stage)]


def conflicts_of_storage(ds: Ds, *, flag: str, stage: int) -> list[str]:
    """`stage` is a ZeRO stage, and `flag` the setting that it comes from."""
    if not ds.load_in_4bit or ds.quant_storage in ("auto", ds.param_dtype):
        return []
    conflicts = []
    if stage == 3:
        conflicts.append(
            f"ds.quant_storage {ds.quant_storage} cannot be sharded by {flag} 3, which takes only weights of "
            f"ds.param_dtype: use {ds.param_dtype}, or auto"
        )
    elif ds.quant_storage != "uint8":
        conflicts.append(
            f"ds.quant_storage {ds.quant_storage} would not survive ds.param_dtype {ds.param_dtype}, to which "
            "DeepSpeed casts every float: use uint8, or auto"
        )
    return conflicts


def conflicts_of_dropout(lora: Lora, *, needs_one_pass: bool) -> list[str]:
    conflicts = []
    if lora.rank > 0 and lora.dropout > 0 and needs_one_pass:
        conflicts.append(
            f"ds.lora.dropout {lora.dropout:g} makes the update's forward pass differ from the engines', and with one "
            "optimizer step per batch of responses its log-probs are the ones compared with the engines': "
            "set it to 0, or lower train.batch_size"
        )
    return conflicts


def reaches_vision(model: Model, lora: Lora) -> bool:
    """Whether `target_modules` include the vision tower or the projector, if the model has them."""
    everything = "all" in lora.target_modules and not (model.freeze_visual_encoder and model.freeze_projector)
    return lora.rank > 0 and (everything or "vision" in lora.target_modules)


def freezes_vision(model: Model, lora: Lora) -> bool:
    """Whether vision tower and projector are frozen."""
    if lora.rank > 0:
        return not reaches_vision(model, lora)
    return model.freeze_visual_encoder and model.freeze_projector


def reason_to_merge(lora: Lora) -> str | None:
    """Return the setting that requires merged weights, because vLLM would not apply its adapters exactly, or None."""
    if lora.use_dora:
        return "ds.lora.use_dora"
    return "ds.lora.target_modules vision" if "vision" in lora.target_modules else None
