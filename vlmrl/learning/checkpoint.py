"""Checkpoints that resume bit for bit, and the final models and adapters of a run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from transformers import PreTrainedModel

from vlmrl.config.ds import Ds
from vlmrl.errors import ConfigError
from vlmrl.learning.checkpoint_checksums import write_checksums
from vlmrl.learning.ema import Ema
from vlmrl.learning.expert_shares import load_shares, save_shares
from vlmrl.learning.safe_load import safe_load
from vlmrl.learning.weights import NamedTensors, saved_tensors, whole_tensors
from vlmrl.models.adapter_files import Base, write_adapter
from vlmrl.models.adapter_plan import PREFIX, AdapterPlan
from vlmrl.models.adapters import adapter_tensors
from vlmrl.models.quantize import true_shape
from vlmrl.plugins import Processor
from vlmrl.system.atomic_folders import begin, finish, partial, prune
from vlmrl.system.storage import writing

__all__ = ["Adapted", "load_state", "prune", "save_adapter", "save_model", "save_state"]

_TAG = "deepspeed"
_SETTING_KEYS = ("initial_lr", "betas", "eps", "weight_decay", "momentum")
"""Keys of a parameter group that follow from the run's settings, apart from the learning rate."""

_GATHER_BYTES = 1 << 30
"""Limit on the bytes of shards that are gathered at a time while a model is saved."""


class Adapted(NamedTuple):
    """A trained adapter and the base that it belongs to."""

    plan: AdapterPlan
    base: Base


def save_state(
    engine: Any,
    net: PreTrainedModel,
    folder: Path,
    *,
    ds: Ds,
    optim: Mapping[str, str],
    extra: dict[str, Any],
    adapted: Adapted | None = None,
    average: Ema | None = None,
) -> None:
    """Write weights, their average, optimizer, schedule and random states of all ranks, and `extra`. A collective.

    `optim` maps the setting that names the optimizer to its value. With an adapter the base is not written: it is still
    in the folder that it was read from.

    Raises StorageError on a disk error; an older folder of the same name stays complete.
    """

    def write(path: Path) -> None:
        # DeepSpeed leaves the bits of a 4-bit base out, but would write its quantization constants.
        hook = engine.module.register_state_dict_post_hook(_drop_frozen) if adapted is not None else None
        engine.save_checkpoint(str(path), tag=_TAG, exclude_frozen_parameters=adapted is not None)
        if hook is not None:
            hook.remove()
        save_shares(net, path)
        if average is not None:
            average.save(path)
        torch.save(_random_state(), _random_file(path))
        if torch.distributed.get_rank() == 0:
            (path / "identity.json").write_text(json.dumps(_identity(net, ds, optim, adapted), indent=1))
            (path / "extra.json").write_text(json.dumps(extra))
        write_checksums(path, rank=torch.distributed.get_rank(), num_ranks=torch.distributed.get_world_size())

    _write_whole(folder, write)


def load_state(
    engine: Any,
    net: PreTrainedModel,
    folder: Path,
    *,
    ds: Ds,
    optim: Mapping[str, str],
    adapted: Adapted | None = None,
    average: Ema | None = None,
) -> dict[str, Any]:
    """Restore what `save_state` wrote and return its `extra`. A collective.

    The optimizer's state comes from the checkpoint. Learning rates, their schedule, weight decay, betas and the
    gradient bound stay those of this run, whose settings may have changed.

    Raises ConfigError when the folder holds no checkpoint, or one of another model, base, number of ranks, ZeRO stage,
    precision or optimizer.
    """
    try:
        identity = json.loads((folder / "identity.json").read_text())
        extra: dict[str, Any] = json.loads((folder / "extra.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder} is not a readable checkpoint: {error}; delete it or start a new run") from error
    _check_identity(identity, _identity(net, ds, optim, adapted), folder)
    settings = _optimizer_settings(engine)
    load = None if adapted is None else _adapter_loader(folder)
    path, _ = engine.load_checkpoint(str(folder), tag=_TAG, custom_load_fn=load)
    if path is None:
        raise ConfigError(f"{folder} lacks the state of its ranks: delete it and resume from an older checkpoint")
    load_shares(net, folder)
    _restore_settings(engine, settings)
    if average is not None:
        average.load(folder)
    _set_random_state(safe_load(_random_file(folder)))
    return extra


def save_model(net: PreTrainedModel, processor: Processor, folder: Path, *, merge: bool = False) -> None:
    """Write the model and its processor for `from_pretrained` and vLLM. A collective.

    With `merge`, adapters are added to its weights, summed in fp32 and rounded once.
    """

    def write(path: Path) -> None:
        weights = dict(whole_tensors(net, saved_tensors(net), max_bytes=_GATHER_BYTES, merge=merge))
        if torch.distributed.get_rank() == 0:
            net.save_pretrained(path, state_dict=weights)
            processor.save(path)

    _write_whole(folder, write)


def save_adapter(net: PreTrainedModel, adapted: Adapted, folder: Path) -> None:
    """Write the adapter for PEFT and vLLM, together with parameters that were trained in full. A collective."""

    def write(path: Path) -> None:
        weights = list(whole_tensors(net, _trained_tensors(net), max_bytes=_GATHER_BYTES))
        if torch.distributed.get_rank() == 0:
            write_adapter(path, adapted.plan, weights, base=adapted.base)

    _write_whole(folder, write)


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Have all ranks write into a folder that appears atomically, when the last of them is done.

    Raises StorageError on a disk error: then nothing of the new folder remains, and an older one is unchanged.
    """
    is_first = torch.distributed.get_rank() == 0
    with _removed_on_error(partial(folder)), writing(folder.name, folder.parent):
        if is_first:
            begin(folder)
        torch.distributed.barrier()
        write(partial(folder))
        torch.distributed.barrier()
        if is_first:
            finish(folder)
        torch.distributed.barrier()


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    """Delete the folder on an error: half a checkpoint would keep a full disk full.

    Belongs around `writing`, which looks at the disk as the error left it.
    """
    try:
        yield
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _OptimizerSettings(NamedTuple):
    """Settings of this run that loading a checkpoint overwrites in the optimizer."""

    groups: list[dict[str, Any]]
    """Of each parameter group, without its learning rate."""
    rates: list[float]
    """Learning rates of the groups, before the schedule."""
    clip: float | None
    """Bound of the gradient norm; None where DeepSpeed does not clip."""


def _optimizer_settings(engine: Any) -> _OptimizerSettings:
    groups = [
        {name: value for name, value in group.items() if name in _SETTING_KEYS}
        for group in engine.optimizer.param_groups
    ]
    return _OptimizerSettings(groups, list(engine.lr_scheduler.base_lrs), getattr(engine.optimizer, "clip_grad", None))


def _restore_settings(engine: Any, settings: _OptimizerSettings) -> None:
    """Replace the settings of the checkpoint by those of this run; the schedule keeps its position."""
    schedule, groups = engine.lr_scheduler, engine.optimizer.param_groups
    schedule.base_lrs = list(settings.rates)
    for group, values, rate, factor in zip(groups, settings.groups, settings.rates, schedule.lr_lambdas, strict=True):
        group.update(values)
        group["lr"] = rate * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in groups]
    if settings.clip is not None:
        engine.optimizer.clip_grad = settings.clip


def _adapter_loader(folder: Path) -> Callable[..., None]:
    """Make DeepSpeed's loader for weights without the base. It raises ConfigError when an adapter's tensor is
    missing."""

    def load(src: dict[str, Any], dst: torch.nn.Module) -> None:
        missing = sorted(name for name, p in dst.named_parameters() if p.requires_grad and name not in src)
        if missing:
            raise ConfigError(
                f"{folder} lacks the adapter tensor {missing[0]}: delete it and resume from an older checkpoint"
            )
        dst.load_state_dict(src, strict=False)

    return load


def _drop_frozen(module: torch.nn.Module, state: dict[str, Any], *_: Any) -> None:
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in state.keys() - trained:
        del state[name]


def _trained_tensors(net: PreTrainedModel) -> NamedTensors:
    """Tensors of the adapters, and parameters that train in full, such as a value head's, under PEFT's names."""
    full = [(n, p) for n, p in net.named_parameters() if p.requires_grad and ".lora_" not in n]
    return [*adapter_tensors(net), *((f"{PREFIX}{name}", parameter) for name, parameter in full)]


def _identity(net: PreTrainedModel, ds: Ds, optim: Mapping[str, str], adapted: Adapted | None) -> dict[str, Any]:
    """Properties of model and run that must equal those of a checkpoint for it to be loaded."""
    tensors = saved_tensors(net) if adapted is None else _trained_tensors(net)
    identity: dict[str, Any] = {
        "model": {name: list(true_shape(tensor)) for name, tensor in tensors},
        "trained": [name for name, parameter in net.named_parameters() if parameter.requires_grad],
        "base": None if adapted is None else adapted.base.fingerprint,
        "ranks": torch.distributed.get_world_size(),
        "ds.zero_stage": ds.zero_stage,
        "ds.param_dtype": ds.param_dtype,
        "ds.load_in_4bit": ds.load_in_4bit,
        "ds.expert_parallel_size": ds.expert_parallel_size,
        "ds.lora.rank": 0,
        **optim,
    }
    if adapted is not None:
        identity |= {
            "ds.lora.rank": adapted.plan.rank,
            "ds.lora.alpha": adapted.plan.alpha,
            "ds.lora.use_rslora": adapted.plan.is_rank_stabilized,
            "ds.lora.use_dora": adapted.plan.has_magnitude,
        }
    return identity


def _check_identity(stored: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    for name, now in expected.items():
        # Older checkpoints lack the keys of adapters, of spread experts and of the optimizer.
        was = stored.get(name, now if name.endswith(".optim") else int(name == "ds.expert_parallel_size"))
        if name not in ("model", "trained", "base") and was != now:
            raise ConfigError(
                f"{folder} was written with {name} {was}, this run has {now}: "
                f"set it back, or give the run another --ckpt.output_dir"
            )
    if stored.get("base") != expected["base"]:
        raise ConfigError(
            f"{folder} is a checkpoint of an adapter on other weights than those of actor.model_name_or_path: "
            f"give the run the model it was started with, or another --ckpt.output_dir"
        )
    if stored["model"] != expected["model"]:
        differ = [
            name
            for name in sorted({*stored["model"], *expected["model"]})
            if stored["model"].get(name) != expected["model"].get(name)
        ]
        raise ConfigError(
            f"{folder} is a checkpoint of another model: {len(differ)} tensors differ, such as {differ[0]}; "
            f"give the run the model it was started with, or another --ckpt.output_dir"
        )
    if stored["trained"] != expected["trained"]:
        raise ConfigError(
            f"{folder} is a checkpoint of a run that trained other parts of the model: freeze the same parts"
        )


def _random_file(folder: Path) -> Path:
    return folder / f"random_rank_{torch.distributed.get_rank()}.pt"


def _random_state() -> dict[str, Any]:
    """State of every generator of this process, as tensors and plain values, which load without unpickling code."""
    version, words, python_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - libraries draw from it
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), python_gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, words, python_gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), python_gauss))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
