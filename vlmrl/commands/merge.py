"""`vlmrl merge`: an adapter and its base become a model that loads by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.config.data import Columns
from vlmrl.config.names import is_given
from vlmrl.config.run import MergeConfig
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import PREFIX
from vlmrl.models.adapters import StoredAdapter, check_base, read_adapter
from vlmrl.models.load import load_model
from vlmrl.models.quantize import DTYPES, dequantized, four_bit, is_four_bit
from vlmrl.models.value_head import HEAD, is_classifier, value_net
from vlmrl.plugins import Processor, first_line, looks_local, processor_of
from vlmrl.system.storage import writing

_FLAG = "merge.model_name_or_path"


def merge(config: MergeConfig) -> None:
    """Write the sum of an adapter and its base, and the processor, into `merge.output`.

    An adapter that was trained on a base of 4 bits is added to the values that those bits stand for, for these are what
    it was trained with; `ds.load_in_4bit false` adds it to the weights in the base's files. The sum has the type that
    the adapter's run had, unless `ds.param_dtype` is given.

    Raises ConfigError when adapter and base do not belong together, when one of them cannot be read, or when
    there is something in the output folder; StorageError when the disk refuses.
    """
    output = Path(config.merge.output).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"merge.output: there is something in {output}: give another folder")
    stored = read_adapter(config.merge.adapter, flag="merge.adapter")
    path = _base(config, stored)
    reader = processor_of(path, Columns(), trust_remote_code=config.merge.trust_remote_code, flag=_FLAG)
    check_base(stored, path, folder=config.merge.adapter, flag="merge.adapter", model_flag=_FLAG)
    net = _load(path, config, stored, reader)
    write_out(net)
    add(net, stored)
    with writing("the merged model", output):
        net.save_pretrained(output)
        reader.save(output)
    told = f"merged {len(stored.targets)} layers of {config.merge.adapter} into {path}: {output}"
    Console().print(told, markup=False, highlight=False, soft_wrap=True)


@torch.no_grad()
def write_out(net: PreTrainedModel) -> None:
    """Put the values of a 4-bit model in the place of their bits: every layer becomes a plain one, in CPU memory."""
    for name, module in list(net.named_modules()):
        if not isinstance(module, nn.Linear) or not is_four_bit(module.weight):
            continue
        weight = dequantized(module.weight).cpu()
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if module.bias is not None:
            plain.bias = module.bias
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, plain)
    net.cpu()


@torch.no_grad()
def add(net: PreTrainedModel, stored: StoredAdapter) -> None:
    """Add the adapter to the weights of its layers, in fp32, and take over what was trained whole beside it.

    Raises ConfigError when the model lacks a layer, or has another shape of it.
    """
    modules, parameters = dict(net.named_modules()), dict(net.named_parameters(remove_duplicate=False))
    for target in stored.targets:
        weight: Any = getattr(modules.get(target), "weight", None)
        if weight is None:
            raise ConfigError(f"merge.adapter: it is for a layer {target}, which {type(net).__name__} does not have")
        try:
            delta = stored.delta(target, weight.data)
        except RuntimeError as error:
            raise ConfigError(f"merge.adapter: {target} does not fit the base: {first_line(error)}") from error
        _check_shape(target, delta, weight)
        weight.data = (weight.float() + delta).to(weight.dtype)
    for name, tensor in whole_tensors(stored).items():
        if name not in parameters:
            raise ConfigError(f"merge.adapter: it holds {name}, which {type(net).__name__} does not have")
        _check_shape(name, tensor, parameters[name])
        parameters[name].data.copy_(tensor)


def whole_tensors(stored: StoredAdapter) -> dict[str, Tensor]:
    """What was trained whole beside the adapter (PEFT's `modules_to_save`), as the score layer of a reward model is."""
    layers = tuple(f"{PREFIX}{target}.lora_" for target in stored.targets)
    return {name.removeprefix(PREFIX): tensor for name, tensor in stored.tensors.items() if not name.startswith(layers)}


def _check_shape(name: str, tensor: Tensor, held: Tensor) -> None:
    if tensor.shape != held.shape:
        raise ConfigError(
            f"merge.adapter: its {name} is {list(tensor.shape)} and the base's {list(held.shape)}: give it its own base"
        )


def _base(config: MergeConfig, stored: StoredAdapter) -> str:
    """The model that the adapter belongs to: a folder or Hub id."""
    given = config.merge.model_name_or_path
    path = given or stored.base.path
    if looks_local(path) and not Path(path).expanduser().is_dir():
        if given is not None:
            raise ConfigError(f"{_FLAG}: there is no folder {path}")
        raise ConfigError(f"merge.adapter: its base was {path}, and there is no such folder: give it as {_FLAG}")
    if given is None:
        _ask_to_follow(path, config.merge.adapter)
    return path


def _ask_to_follow(path: str, adapter: str) -> None:
    """Ask at the terminal whether to read the base that the adapter names: whoever wrote the adapter chose that path.

    Raises ConfigError when the user declines, or when nobody is there to be asked.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            f"merge.adapter: {adapter} names {path!r} as its base: if you trust that, give it as {_FLAG}, or merge at "
            "a terminal and say yes"
        )
    if input(f"{adapter} names {path!r} as its base. Read it from there? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError(f"merge.adapter: nothing was merged: give the base of {adapter} as {_FLAG}")


def _load(path: str, config: MergeConfig, stored: StoredAdapter, reader: Processor) -> PreTrainedModel:
    """The base as the adapter was trained on it."""
    ds = config.ds
    if not is_given(config, "ds.param_dtype") and stored.param_dtype is not None:
        ds = ds.model_copy(update={"param_dtype": stored.param_dtype})
    if not is_given(config, "ds.load_in_4bit"):
        ds = ds.model_copy(update={"load_in_4bit": stored.base.is_four_bit})
    elif ds.load_in_4bit and stored.base.fingerprint is not None and not stored.base.is_four_bit:
        raise ConfigError("ds.load_in_4bit: the adapter was trained on its base as it is: leave the flag out")
    how: dict[str, Any] = {
        "dtype": DTYPES[ds.param_dtype],
        "attn_implementation": None,
        "trust_remote_code": config.merge.trust_remote_code,
        "four_bit": four_bit(ds, reader),
        "flag": _FLAG,
    }
    head = whole_tensors(stored).get(HEAD)
    if head is not None:
        # The adapter's own head takes the place of whatever is there.
        return value_net(path, head_seed=0, labels=head.shape[0], **how)
    if is_classifier(path, trust_remote_code=config.merge.trust_remote_code):
        return value_net(path, head_seed=None, **how)
    return load_model(path, **how)
