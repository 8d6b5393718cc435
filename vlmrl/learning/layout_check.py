"""Comparison of the layouts in fp32, on the first layers of the model, where rounding hides no fault.

In half precision, rounding errors are as large as the effect of wrong positions or of a leak between two responses. So
embeddings, vision tower and the first layers are copied in fp32, and the values and gradients of `shared` and `packed`
are compared with those of `padded`. This verifies masks and positions, which are the same in every precision.

Rounding in fp32 is not small in every model: where keys have large biases, as in Qwen2.5's first layers, the gradients
of what feeds them are differences of large numbers. So a difference in fp32 is computed again in double precision.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from vlmrl.data.packing import collect, make_pack, place
from vlmrl.learning.weights import gathered
from vlmrl.models.attention import Setting, implementation, use_packed_vision_attention
from vlmrl.models.double_precision import KeepDouble
from vlmrl.models.inputs import model_inputs
from vlmrl.models.linear_attention import reference_functions, run_per_span
from vlmrl.models.load import project_patches, without_weights
from vlmrl.models.quantize import dequantized
from vlmrl.models.scorer import Backbone, scatter_scored
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Layout, Sample

_NUM_LAYERS = 2
_SUSPECT = 5e-6
"""A difference in fp32 above this may be more than rounding: half the bound of `vlmrl.verify.layouts`."""
_MIN_SCALE = 1e-3
"""Share of the largest gradient norm that a smaller gradient is compared with: the gradient of a key bias is nothing
but rounding."""


class Difference(NamedTuple):
    """Relative difference of a layout from `padded`."""

    values: float
    gradients: float
    """The largest over the parameters."""


def compare_layouts(
    net: PreTrainedModel,
    processor: Processor,
    samples: Sequence[Sample],
    layouts: Sequence[Layout],
    *,
    attention: Setting,
    device: torch.device,
) -> dict[Layout, Difference]:
    """Compare each of `layouts` with `padded` on these samples; {} on all ranks but the first.

    A collective if the model is sharded. Adapters are left out and 4-bit weights dequantized: neither affects masks or
    positions.
    """
    # Making a model draws random numbers, which must not shift those of the run.
    with torch.random.fork_rng(devices=[]):
        first = copy_first_layers(net, processor, samples, implementation(attention, device))
    if not _is_first_rank():
        return {}
    try:
        return _differences(first, processor, samples, layouts, device)
    except torch.OutOfMemoryError:  # the model may leave no room on the device for the copy, which fits on the CPU
        return _differences(first, processor, samples, layouts, torch.device("cpu"))


def _differences(
    first: PreTrainedModel,
    processor: Processor,
    samples: Sequence[Sample],
    layouts: Sequence[Layout],
    device: torch.device,
) -> dict[Layout, Difference]:
    first.base_model.to(device)

    def compare() -> dict[Layout, Difference]:
        expected = _Outputs.of(first, processor, samples, "padded", device)
        return {
            layout: _Outputs.of(first, processor, samples, layout, device).difference(expected) for layout in layouts
        }

    with reference_functions(first) if device.type == "cpu" else nullcontext():
        differences = compare()
    if all(gap <= _SUSPECT for gaps in differences.values() for gap in gaps):
        return differences
    for name, parameter in first.named_parameters():
        # The tower's outputs are the same in all layouts.
        if parameter.device.type != "meta" and processor.parameter_group(name) == "language":
            parameter.data = parameter.data.double()
    with KeepDouble(), reference_functions(first):
        return compare()


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def copy_first_layers(
    net: PreTrainedModel,
    processor: Processor,
    samples: Sequence[Sample],
    attn_implementation: str | dict[str, str],
) -> PreTrainedModel:
    """Copy vision tower, projector and first layers in fp32, with embeddings of only the samples' tokens, to the CPU.

    On all ranks but the first the copy has no values. A collective if the model is sharded. `attn_implementation` is
    that of `from_pretrained`.
    """
    config = copy.deepcopy(net.config)
    text = config.get_text_config()
    text.num_hidden_layers = _num_layers(text)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    # The default kernel of experts has no double precision.
    config._experts_implementation = "eager"
    first = without_weights(
        lambda c: type(net)._from_config(c, dtype=torch.float32, attn_implementation=attn_implementation), config
    )
    use_packed_vision_attention(first)
    run_per_span(first)
    project_patches(first)
    used = np.unique(np.concatenate([*(sample.tokens for sample in samples), [processor.pad_token_id]]))
    sources = {
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
            source = sources[full]
            with gathered([(full, source)]):
                if not _is_first_rank():
                    continue
                whole = dequantized(source).detach()
                has_rows = module is embedding and name == "weight"  # Gemma's has a scale too
                value = whole[torch.from_numpy(used).to(whole.device)] if has_rows else whole
                value = value.to("cpu", torch.float32 if value.is_floating_point() else value.dtype, copy=True)
            if name in module._buffers:
                module._buffers[name] = value
                continue
            # The tower's outputs are the same in all layouts, so its gradients add nothing to the projector's.
            trains = module is embedding or processor.parameter_group(full) != "vision"
            module._parameters[name] = nn.Parameter(value, requires_grad=trains)
    weight = embedding.weight
    assert isinstance(weight, nn.Parameter)
    first.set_input_embeddings(_UsedTokens(torch.from_numpy(used), weight))
    return first.eval()


def _num_layers(text: PretrainedConfig) -> int:
    """Return how many layers to compare: two, or as many as have every kind of layer."""
    kinds = list(getattr(text, "layer_types", None) or ())
    until_all = 1 + max((kinds.index(kind) for kind in set(kinds)), default=0)
    return min(max(_NUM_LAYERS, until_all), text.num_hidden_layers)


class _UsedTokens(nn.Module):
    """Embedding of U tokens of the vocabulary."""

    tokens: Tensor

    def __init__(self, tokens: Tensor, weight: nn.Parameter) -> None:
        """`tokens` [U] ascending, `weight` [U, D]."""
        super().__init__()
        self.register_buffer("tokens", tokens)
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(torch.searchsorted(self.tokens, ids), self.weight)


class _Outputs(NamedTuple):
    """Values and gradients of the first layers in one layout."""

    values: Floats
    """The projection of each sampled token's state onto one direction, sample after sample."""
    gradients: dict[str, Tensor]
    """Parameter name -> gradient of a weighted sum of the values."""

    @classmethod
    def of(
        cls, net: PreTrainedModel, processor: Processor, samples: Sequence[Sample], layout: Layout, device: torch.device
    ) -> _Outputs:
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
        projected = states @ direction.to(states)
        rows, columns = pack.shape
        by_sample = collect(pack, scatter_scored(projected.detach(), scored)[:rows, :columns])
        values = np.concatenate([row[sample.sampled] for row, sample in zip(by_sample, samples, strict=True)])
        loss = (projected * place(pack, weights, fill=0.0).to(device)[scored[:rows, :columns]]).sum()
        trained = {name: parameter for name, parameter in net.named_parameters() if _trains(parameter)}
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
        net.zero_grad()
        return cls(values, gradients)

    def difference(self, expected: _Outputs) -> Difference:
        norms = {name: float(gradient.norm()) for name, gradient in expected.gradients.items()}
        min_norm = _MIN_SCALE * max(norms.values())
        gaps = {name: float((self.gradients[name] - gradient).norm()) for name, gradient in expected.gradients.items()}
        return Difference(
            values=float(np.linalg.norm(self.values - expected.values) / np.linalg.norm(expected.values)),
            gradients=max(gaps[name] / max(norms[name], min_norm) for name in gaps),
        )


def _trains(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.device.type != "meta"
