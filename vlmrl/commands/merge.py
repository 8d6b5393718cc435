"""`vlmrl merge`: add an adapter to its base, and write the result as a complete model."""

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
from vlmrl.config.verbs import MergeConfig
from vlmrl.errors import ConfigError
from vlmrl.hub.merged_card import write_merged_card
from vlmrl.models.adapter_files import StoredAdapter, check_base, read_adapter
from vlmrl.models.adapter_plan import PREFIX
from vlmrl.models.kind import is_classifier
from vlmrl.models.load import load_model
from vlmrl.models.quantize import DTYPES, dequantized, four_bit, is_four_bit
from vlmrl.models.value_head import HEAD, value_net
from vlmrl.plugins import Processor, first_line, looks_local, processor_of
from vlmrl.system.storage import writing

_FLAG = "merge.model_name_or_path"


def merge(config: MergeConfig) -> None:
    """Write the merged model, and the processor, to `merge.output`.

    An adapter that was trained on a 4-bit base is added to the dequantized weights, which it was trained with;
    `ds.load_in_4bit false` adds it to the weights in the base's files. The result has the data type of the adapter's
    run, unless `ds.param_dtype` is given.

    Raises ConfigError when adapter and base do not belong together, when one of them cannot be read, or when the output
    folder is not empty; StorageError when the model cannot be written.
    """
    output = Path(config.merge.output).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"merge.output: {output} is not empty: give another folder")
    stored = read_adapter(config.merge.adapter, flag="merge.adapter")
    path = _base(config, stored)
    write_merged(config, stored, path, output)
    with writing("the merged model", output):
        write_merged_card(Path(config.merge.adapter).expanduser(), path, output)
    line = f"merged {len(stored.targets)} layers of {config.merge.adapter} into {path}: {output}"
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


def write_merged(config: MergeConfig, stored: StoredAdapter, path: str, output: Path) -> None:
    """Write the base `path` with the adapter to the folder `output`; errors are those of `merge`."""
    processor = processor_of(path, Columns(), trust_remote_code=config.merge.trust_remote_code, flag=_FLAG)
    check_base(stored, path, folder=config.merge.adapter, flag="merge.adapter", model_flag=_FLAG)
    net = _load(path, config, stored, processor)
    dequantize(net)
    add_adapter(net, stored)
    with writing("the merged model", output):
        net.save_pretrained(output)
        processor.save(output)


@torch.no_grad()
def dequantize(net: PreTrainedModel) -> None:
    """Replace the 4-bit layers of a model by plain ones, and move it to CPU memory."""
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
def add_adapter(net: PreTrainedModel, stored: StoredAdapter) -> None:
    """Add the adapter to the weights of its layers, in fp32, and copy the layers that were trained in full.

    Raises ConfigError when the model lacks a layer, or has it in another shape.
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
    """Layers that were trained in full (PEFT's `modules_to_save`), such as the score layer of a reward model."""
    layers = tuple(f"{PREFIX}{target}.lora_" for target in stored.targets)
    return {name.removeprefix(PREFIX): tensor for name, tensor in stored.tensors.items() if not name.startswith(layers)}


def _check_shape(name: str, tensor: Tensor, of_base: Tensor) -> None:
    if tensor.shape != of_base.shape:
        raise ConfigError(
            f"merge.adapter: its {name} is {list(tensor.shape)} and the base's {list(of_base.shape)}: give the base "
            "that it was trained on"
        )


def _base(config: MergeConfig, stored: StoredAdapter) -> str:
    """Return the base of the adapter, given or named in its files: a folder or Hub id."""
    given = config.merge.model_name_or_path
    path = given or stored.base.path
    if looks_local(path) and not Path(path).expanduser().is_dir():
        if given is not None:
            raise ConfigError(f"{_FLAG}: there is no folder {path}")
        raise ConfigError(f"merge.adapter: its base was {path}, and there is no such folder: give it as {_FLAG}")
    if given is None:
        _confirm_base(path, config.merge.adapter)
    return path


def _confirm_base(path: str, adapter: str) -> None:
    """Ask at the terminal whether to load the base that the adapter names: its author chose that path.

    Raises ConfigError when the user declines, or there is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            f"merge.adapter: {adapter} names {path!r} as its base: if you trust that, give it as {_FLAG}, or run merge "
            "at a terminal and confirm"
        )
    if input(f"{adapter} names {path!r} as its base. Read it from there? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError(f"merge.adapter: nothing was merged: give the base of {adapter} as {_FLAG}")


def _load(path: str, config: MergeConfig, stored: StoredAdapter, processor: Processor) -> PreTrainedModel:
    """Load the base with the data type and quantization that the adapter was trained with."""
    ds = config.ds
    if not is_given(config, "ds.param_dtype") and stored.param_dtype is not None:
        ds = ds.model_copy(update={"param_dtype": stored.param_dtype})
    if not is_given(config, "ds.load_in_4bit"):
        ds = ds.model_copy(update={"load_in_4bit": stored.base.is_four_bit})
    elif ds.load_in_4bit and stored.base.fingerprint is not None and not stored.base.is_four_bit:
        raise ConfigError(
            "ds.load_in_4bit: the adapter was trained on a base that is not in 4 bits: leave the flag out"
        )
    options: dict[str, Any] = {
        "dtype": DTYPES[ds.param_dtype],
        "attn_implementation": None,
        "trust_remote_code": config.merge.trust_remote_code,
        "four_bit": four_bit(ds, processor),
        "flag": _FLAG,
    }
    head = whole_tensors(stored).get(HEAD)
    if head is not None:
        # The seed does not matter: the adapter's own head replaces this one.
        return value_net(path, head_seed=0, labels=head.shape[0], **options)
    if is_classifier(path, trust_remote_code=config.merge.trust_remote_code):
        return value_net(path, head_seed=None, **options)
    return load_model(path, **options)
