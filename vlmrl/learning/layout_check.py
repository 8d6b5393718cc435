"""Layouts compared where precision hides nothing: in fp32, on the first layers of the model.

In half precision, rounding is as large as what wrong positions or a leak between two responses do. So embeddings,
vision tower and the first layers are copied in fp32, and `shared` and `packed` are held against `padded`, values and
gradients. This proves who looks at whom and from which position, which the kernels of every precision are told alike.

Rounding in fp32 is not small in every model: where keys have large biases, as in Qwen2.5's first layers, the gradients
of what feeds them are differences of large numbers. So what looks wrong in fp32 is computed again in double precision.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.data.packing import collect, make_pack, place
from vlmrl.learning.weights import gathered
from vlmrl.models.attention import Setting, implementation, see_all_images_at_once
from vlmrl.models.inputs import model_inputs
from vlmrl.models.load import without_weights
from vlmrl.models.patches import project_patches
from vlmrl.models.quantize import dequantized
from vlmrl.models.scorer import Backbone, scattered
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Layout, Sample

_NUM_LAYERS = 2
_DOUBT = 5e-6
"""A difference in fp32 that may be more than rounding: half of what `vlmrl.verify.layouts` takes for a fault."""
_SMALL = 1e-3
"""A gradient that is smaller than this share of the largest is compared with that share: a bias of keys has none but
rounding."""


class Difference(NamedTuple):
    """How far a layout is from `padded`, relative to it."""

    values: float
    gradients: float
    """Of the parameter where it is largest."""


def compare_layouts(
    net: PreTrainedModel,
    processor: Processor,
    samples: Sequence[Sample],
    layouts: Sequence[Layout],
    *,
    attention: Setting,
    device: torch.device,
) -> dict[Layout, Difference]:
    """How far each of `layouts` is from `padded` for these samples; nothing on ranks but the first.

    A collective where the model is sharded. Adapters are left out, and 4 bits are written out: neither is asked who
    looks at whom.
    """
    # Whatever is drawn to make a model is not missed by those who draw after it.
    with torch.random.fork_rng(devices=[]):
        first = first_layers(net, processor, samples, implementation(attention, device))
    if not _is_first_rank():
        return {}
    try:
        return _differences(first, processor, samples, layouts, device)
    except torch.OutOfMemoryError:  # the copy is small beside the model, and a device may be full of that
        return _differences(first, processor, samples, layouts, torch.device("cpu"))


def _differences(
    first: PreTrainedModel,
    processor: Processor,
    samples: Sequence[Sample],
    layouts: Sequence[Layout],
    device: torch.device,
) -> dict[Layout, Difference]:
    first.base_model.to(device)

    def compared() -> dict[Layout, Difference]:
        expected = _Seen.of(first, processor, samples, "padded", device)
        return {layout: _Seen.of(first, processor, samples, layout, device).difference(expected) for layout in layouts}

    found = compared()
    if all(gap <= _DOUBT for gaps in found.values() for gap in gaps):
        return found
    for name, parameter in first.named_parameters():
        # What the tower says of the images is the same in all layouts.
        if parameter.device.type != "meta" and processor.parameter_group(name) == "language":
            parameter.data = parameter.data.double()
    return compared()


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def first_layers(
    net: PreTrainedModel, processor: Processor, samples: Sequence[Sample], how: str | dict[str, str]
) -> PreTrainedModel:
    """A copy in fp32 of what comes first in the model, with embeddings of the samples' tokens alone, in CPU memory; on
    ranks but the first there are no numbers in it. A collective where the model is sharded.

    `how` is what `from_pretrained` would take for its attention.
    """
    config = copy.deepcopy(net.config)
    text = config.get_text_config()
    text.num_hidden_layers = min(_NUM_LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    first = without_weights(lambda c: type(net)._from_config(c, dtype=torch.float32, attn_implementation=how), config)
    see_all_images_at_once(first)
    project_patches(first)
    used = np.unique(np.concatenate([*(sample.tokens for sample in samples), [processor.pad_token_id]]))
    held = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False))
    }
    embedding, body = first.get_input_embeddings(), first.base_model
    prefix = next((f"{name}." for name, module in first.named_modules() if module is body and name), "")
    for path, module in list(body.named_modules()):
        for name in [*module._parameters, *module._buffers]:
            entry = module._parameters if name in module._parameters else module._buffers
            if entry[name] is None:
                continue
            full = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
            source = held[full]
            with gathered([(full, source)]):
                if not _is_first_rank():
                    continue
                whole = dequantized(source).detach()
                value = whole[torch.from_numpy(used).to(whole.device)] if module is embedding else whole
                value = value.to("cpu", torch.float32 if value.is_floating_point() else value.dtype, copy=True)
            if name in module._buffers:
                module._buffers[name] = value
                continue
            # What comes before the projector is the same in all layouts, and what follows tells of it.
            trains = module is embedding or processor.parameter_group(full) != "vision"
            module._parameters[name] = nn.Parameter(value, requires_grad=trains)
    weight = embedding.weight
    assert isinstance(weight, nn.Parameter)
    first.set_input_embeddings(_UsedTokens(torch.from_numpy(used), weight))
    return first.eval()


class _UsedTokens(nn.Module):
    """An embedding of a few tokens."""

    tokens: Tensor

    def __init__(self, tokens: Tensor, weight: nn.Parameter) -> None:
        """`tokens` [U] ascending, `weight` [U, D]."""
        super().__init__()
        self.register_buffer("tokens", tokens)
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(torch.searchsorted(self.tokens, ids), self.weight)


class _Seen(NamedTuple):
    """What the layers say in one layout."""

    values: Floats
    """A number per sampled token, sample after sample: its state along one direction."""
    gradients: dict[str, Tensor]
    """Of a weighted sum of the values."""

    @classmethod
    def of(
        cls, net: PreTrainedModel, processor: Processor, samples: Sequence[Sample], layout: Layout, device: torch.device
    ) -> _Seen:
        rng = np.random.default_rng(0)
        direction = torch.from_numpy(rng.standard_normal(net.config.get_text_config().hidden_size, dtype=np.float32))
        weights = [1 + 0.5 * rng.standard_normal(len(sample.tokens), dtype=np.float32) for sample in samples]
        pack = make_pack(samples, range(len(samples)), layout)
        inputs: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in model_inputs(net, processor, pack).items()
        }
        scored = inputs["scored"]
        states, _ = Backbone(net).states(inputs)
        found = states @ direction.to(states)
        rows, columns = pack.shape
        laid = collect(pack, scattered(found.detach(), scored)[:rows, :columns])
        values = np.concatenate([row[sample.sampled] for row, sample in zip(laid, samples, strict=True)])
        loss = (found * place(pack, weights, fill=0.0).to(device)[scored[:rows, :columns]]).sum()
        trained = {name: parameter for name, parameter in net.named_parameters() if _trains(parameter)}
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
        net.zero_grad()
        return cls(values, gradients)

    def difference(self, expected: _Seen) -> Difference:
        scale = {name: float(gradient.norm()) for name, gradient in expected.gradients.items()}
        least = _SMALL * max(scale.values())
        apart = {name: float((self.gradients[name] - gradient).norm()) for name, gradient in expected.gradients.items()}
        return Difference(
            values=float(np.linalg.norm(self.values - expected.values) / np.linalg.norm(expected.values)),
            gradients=max(apart[name] / max(scale[name], least) for name in apart),
        )


def _trains(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.device.type != "meta"
