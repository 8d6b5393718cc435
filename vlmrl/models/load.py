"""Load a model from its folder or Hub id, and freeze parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import set_zero3_state
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from vlmrl.errors import ConfigError
from vlmrl.models.attention import use_packed_vision_attention
from vlmrl.models.buffers import restore_buffers
from vlmrl.models.checkpoint_layout import keep_checkpoint_layout
from vlmrl.models.linear_attention import run_per_span
from vlmrl.models.quantize import FourBit, is_four_bit, prepare_four_bit, quantization, true_shape
from vlmrl.plugins import MODEL_FLAG, ONLY_SAFETENSORS, first_line, located

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

    from vlmrl.plugins import ParameterGroup, Processor


class ParameterCount(NamedTuple):
    """A row of the table of trainable parameters."""

    group: ParameterGroup
    trainable: int
    total: int


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | dict[str, str] | None,
    trust_remote_code: bool = False,
    four_bit: FourBit | None = None,
    flag: str = MODEL_FLAG,
) -> PreTrainedModel:
    """Load the text or vision-language model `path`, a folder or Hub id.

    The model is in CPU memory. With `four_bit` its language model is in 4 bits, and the model on the GPU if there is
    one. `flag` is the setting that names the model, for messages.

    Raises ConfigError when there is no such model, when it cannot be read, or when its files lack a weight, which would
    silently be random.
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
    refuse_missing_weights(lacking, path, flag=flag)
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
    """Call `factory.from_pretrained`, and use packed attention; returns the model and the names of missing weights.

    `flag` is the setting that `path` came from, for messages. Raises ConfigError when the files cannot be read.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{flag}: the weights of {path} are already quantized: name the original model")
    more: dict[str, Any] = {} if bits is None else {"quantization_config": bits}
    try:
        net, report = factory.from_pretrained(
            located(path, flag=flag),
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Without it, Transformers falls back to pickles.
            use_safetensors=True,
            **more,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if "use_safetensors" in str(error):  # of a Hub id; folders were checked before
            raise ConfigError(f"{flag}: {path} has no *.safetensors: {ONLY_SAFETENSORS}") from error
        raise _unreadable(path, error, flag) from error
    assert isinstance(net, PreTrainedModel)
    if bits is not None:
        prepare_four_bit(net)
    elif is_deepspeed_zero3_enabled():
        restore_buffers(net)
    _forget_unused_conversions(net)
    keep_checkpoint_layout(net)
    use_packed_vision_attention(net)
    run_per_span(net)
    project_patches(net)
    return net, sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])


def _forget_unused_conversions(net: PreTrainedModel) -> None:
    """Forget the renamings that no weight of the files needed: saving would apply their reverse.

    Under ZeRO-3 Transformers keeps them all, and would save `model.layers` of a Qwen3.5 text model as
    `model.language_model.layers`, which are the names of its files with a vision tower.
    """
    conversions = getattr(net, "_weight_conversions", None)
    if conversions is not None:
        net._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]


def refuse_missing_weights(lacking: Sequence[str], path: str, *, flag: str) -> None:
    """Raise ConfigError when the files in `path` lack a weight."""
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ConfigError(f"{flag}: the files of {path} lack the weight {lacking[0]}{more}: get them again")


def skeleton(path: str, *, trust_remote_code: bool = False, flag: str = MODEL_FLAG) -> PreTrainedModel:
    """Make the model without weights, on the meta device: the names, shapes and classes of `load_model`.

    Reads only the configuration, so that a driver can inspect a model before any weight is read. `flag` is the
    setting that `path` came from, for messages. Raises ConfigError when there is no such model.
    """
    try:
        factory, config = _factory(located(path, flag=flag), trust_remote_code=trust_remote_code)
        return without_weights(partial(factory.from_config, trust_remote_code=trust_remote_code), config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unreadable(path, error, flag) from error


def without_weights(make: Callable[[Any], Any], config: Any) -> PreTrainedModel:
    """Call `make` with a configuration, on the meta device."""
    # Within `sharded_loading`, Transformers would try to shard this empty model too.
    with torch.device("meta"), set_zero3_state():
        net = make(config)
    assert isinstance(net, PreTrainedModel)
    return net


def freeze(net: nn.Module, processor: Processor, *, vision: bool, projector: bool) -> None:
    """Freeze the vision tower, the projector, or both. Everything else trains, except weights in 4 bits, which have no
    gradient.

    Raises ConfigError when the model has no such part: the setting would have no effect.
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


def trainable_table(net: nn.Module, processor: Processor) -> list[ParameterCount]:
    """Count trainable and all parameters of each part of the model. Tied weights count once."""
    totals: dict[ParameterGroup, list[int]] = {}
    for name, parameter in net.named_parameters():
        size = math.prod(true_shape(parameter))
        counts = totals.setdefault(processor.parameter_group(name), [0, 0])
        counts[0] += size if parameter.requires_grad else 0
        counts[1] += size
    order: tuple[ParameterGroup, ...] = ("vision", "projector", "language")
    return [ParameterCount(group, *totals[group]) for group in order if group in totals]


def _factory(where: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the Auto class of this kind of model, and the configuration."""
    config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    takes_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM, config


def _unreadable(path: str, error: Exception, flag: str) -> ConfigError:
    return ConfigError(f"{flag}: {path} is not a model that can be read: {first_line(error)}")


class PatchProjection(nn.Conv3d):
    """A vision tower's patch embedding as a matrix product: PyTorch's 3-D convolutions are slow at it.

    Parameters and their names stay the same.
    """

    def forward(self, patches: Tensor) -> Tensor:
        """[P, C, t, h, w] patches of exactly the kernel's size -> [P, D, 1, 1, 1]."""
        product = nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None, None]


def project_patches(net: nn.Module) -> None:
    """Turn the patch embeddings of a model's vision tower into products, in place: layers `patch_embed.proj` whose
    stride equals their kernel size.
    """
    for name, module in net.named_modules():
        if type(module) is nn.Conv3d and name.endswith("patch_embed.proj") and _has_disjoint_patches(module):
            module.__class__ = PatchProjection


def _has_disjoint_patches(layer: nn.Conv3d) -> bool:
    is_plain = layer.groups == 1 and set(layer.dilation) == {1} and set(layer.padding) == {0}
    return is_plain and layer.stride == layer.kernel_size
