"""Read a model from its folder or Hub id, and choose which of its parts train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import set_zero3_state
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from vlmrl.errors import ConfigError
from vlmrl.models.attention import see_all_images_at_once
from vlmrl.models.buffers import restore_buffers
from vlmrl.models.patches import project_patches
from vlmrl.models.quantize import FourBit, is_four_bit, quantization, settle, true_shape
from vlmrl.plugins import MODEL_FLAG, ONLY_SAFETENSORS, first_line, located

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

    from vlmrl.plugins import ParameterGroup, Processor


class Part(NamedTuple):
    """One line of the trainable-parameter table."""

    group: ParameterGroup
    trainable: int
    """Numbers that train."""
    total: int
    """Numbers in all."""


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | dict[str, str] | None,
    trust_remote_code: bool = False,
    four_bit: FourBit | None = None,
    flag: str = MODEL_FLAG,
) -> PreTrainedModel:
    """The model in the folder or Hub id `path`: text and vision-language models alike.

    It is in CPU memory; with `four_bit`, its language model in 4 bits, it is on the GPU where there is one. `flag` is
    the setting that named it, for messages.

    Raises ConfigError when there is no such model, when it cannot be read, or when its files lack a weight: a weight
    that is not in the files would be random, and nothing later would tell.
    """
    where = located(path, flag=flag)
    bare = None if four_bit is None else skeleton(path, trust_remote_code=trust_remote_code, flag=flag)
    try:
        factory, config = _factory(where, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unreadable(path, error, flag) from error
    net, lacking = read_weights(
        factory,
        path,
        config=config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        bits=None if four_bit is None or bare is None else quantization(four_bit, bare, dtype=dtype),
        flag=flag,
    )
    refuse_lacking(lacking, path, flag=flag)
    return net


def read_weights(
    factory: Any,
    path: str,
    *,
    config: Any,
    dtype: torch.dtype,
    attn_implementation: str | dict[str, str] | None,
    trust_remote_code: bool,
    bits: BitsAndBytesConfig | None,
    flag: str,
) -> tuple[PreTrainedModel, list[str]]:
    """What `factory.from_pretrained` makes of the files, with our attention, and the names of weights that they lack.

    `flag` is the setting that `path` came from, for messages. Raises ConfigError when they cannot be read.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{flag}: the weights of {path} are quantised already: name the model that they were made of")
    more: dict[str, Any] = {} if bits is None else {"quantization_config": bits}
    try:
        net, report = factory.from_pretrained(
            located(path, flag=flag),
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Else it would fall back to pickles.
            use_safetensors=True,
            **more,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if "use_safetensors" in str(error):  # of a Hub id; a folder was refused before
            raise ConfigError(f"{flag}: {path} has no *.safetensors: {ONLY_SAFETENSORS}") from error
        raise _unreadable(path, error, flag) from error
    assert isinstance(net, PreTrainedModel)
    if bits is not None:
        settle(net)
    elif is_deepspeed_zero3_enabled():
        restore_buffers(net)
    see_all_images_at_once(net)
    project_patches(net)
    return net, sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])


def refuse_lacking(lacking: Sequence[str], path: str, *, flag: str) -> None:
    """Raise ConfigError when the files in `path` lack a weight."""
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ConfigError(f"{flag}: the files of {path} lack the weight {lacking[0]}{more}: get them again")


def skeleton(path: str, *, trust_remote_code: bool = False, flag: str = MODEL_FLAG) -> PreTrainedModel:
    """The model without its weights, on the meta device: names, shapes and classes, as `load_model` has them in memory.

    Reads the configuration alone, so that a driver can ask what a model has before any weight is read. `flag` is the
    setting that `path` came from, for messages. Raises ConfigError when there is no such model.
    """
    try:
        factory, config = _factory(located(path, flag=flag), trust_remote_code=trust_remote_code)
        return without_weights(partial(factory.from_config, trust_remote_code=trust_remote_code), config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unreadable(path, error, flag) from error


def without_weights(make: Callable[[Any], Any], config: Any) -> PreTrainedModel:
    """What `make` makes of a configuration, on the meta device."""
    # Where ZeRO-3 is about to shard a model, Transformers would shard this one too, and there is nothing in it.
    with torch.device("meta"), set_zero3_state():
        net = make(config)
    assert isinstance(net, PreTrainedModel)
    return net


def freeze(net: nn.Module, processor: Processor, *, vision: bool, projector: bool) -> None:
    """Turn gradients off for the vision tower, for the projector, or for both; everything else trains, but for weights
    in 4 bits, which have no gradient.

    Raises ConfigError when the model has no such part: the setting would do nothing.
    """
    groups = {name: processor.parameter_group(name) for name, _ in net.named_parameters()}
    for part, is_frozen, flag in (
        ("vision", vision, "actor.freeze_visual_encoder"),
        ("projector", projector, "actor.freeze_projector"),
    ):
        if is_frozen and part not in groups.values():
            raise ConfigError(f"{flag}: the model has no {part} parameters to freeze: leave it off")
    frozen = {"vision": vision, "projector": projector, "language": False}
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not frozen[groups[name]] and not is_four_bit(parameter))


def trainable_table(net: nn.Module, processor: Processor) -> list[Part]:
    """Numbers that train and numbers in all, for each part that the model has. Tied weights count once."""
    totals: dict[ParameterGroup, list[int]] = {}
    for name, parameter in net.named_parameters():
        size = math.prod(true_shape(parameter))
        counts = totals.setdefault(processor.parameter_group(name), [0, 0])
        counts[0] += size if parameter.requires_grad else 0
        counts[1] += size
    order: tuple[ParameterGroup, ...] = ("vision", "projector", "language")
    return [Part(group, *totals[group]) for group in order if group in totals]


def _factory(where: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """What makes a model of this kind, and its configuration."""
    config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    takes_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM, config


def _unreadable(path: str, error: Exception, flag: str) -> ConfigError:
    return ConfigError(f"{flag}: {path} is not a model that can be read: {first_line(error)}")
