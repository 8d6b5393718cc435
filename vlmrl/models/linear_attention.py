"""Linear attention (gated delta rule, short convolution) that isolates packed samples and shares a prompt's state.

Transformers runs these layers over whole rows, so that the state of a sample flows into the next one of its row. Here
they run over the spans of the attention plan instead, in batches of spans of similar length, by their own `forward`. A
prompt's span runs once; its final states are the initial ones of its responses, and take gradients from all of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.models.attention_plan import AttentionPlan, Span
from vlmrl.types import Bools, Ints

_LAYERS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Transformers' classes for which tests show that the layouts are equal."""
_WITH_KERNELS = ("causal_conv1d_fn", "causal_conv1d_update", "_gated_delta_rule")
"""Ends of the names of Transformers' functions that packages replace."""
ATTENTION_TYPES = ("full_attention", "sliding_attention")
"""Layer types without a state."""
_CHUNK = 64
"""Tokens that the gated delta rule computes at once: it pads every span to a multiple of them."""


def run_per_span(net: PreTrainedModel) -> None:
    """Make the linear-attention layers of a model follow an attention plan, in place.

    Their class changes; parameters and their names stay the same. Layers of unknown classes are left alone.
    """
    for module in net.modules():
        kind: Any = type(module)
        if kind.__name__ in _LAYERS and kind.__module__.startswith("transformers."):
            module.__class__ = _per_span(kind)


def mixes_samples(net: PreTrainedModel) -> bool:
    """Whether layers carry a state from one sample of a row to the next, so that only the layout `padded` is right."""
    return state_of(net) is not None and not follows_plan(net)


def state_of(net: PreTrainedModel) -> str | None:
    """Name the layers that pass anything but attention from token to token; None if there are none.

    Transformers marks most of these models as such. Others are found by their layer types, or by convolutions.
    """
    if net._is_stateful:
        return "recurrent layers"
    kinds = getattr(net.config.get_text_config(), "layer_types", None) or ()
    for kind in kinds:
        if kind not in ATTENTION_TYPES:
            return f"layers of {kind}"
    has_convolution = any(isinstance(module, nn.Conv1d) for module in net.base_model.get_decoder().modules())
    return "convolutions" if has_convolution else None


def follows_plan(net: PreTrainedModel) -> bool:
    """Whether all layers with a state run per span, so that rows of several samples need an attention plan."""
    kinds = getattr(net.config.get_text_config(), "layer_types", None) or ()
    number = sum(isinstance(module, LinearAttention) for module in net.modules())
    return 0 < number == sum(kind not in ATTENTION_TYPES for kind in kinds)


@contextmanager
def reference_functions(net: nn.Module) -> Iterator[None]:
    """Context in which linear attention computes by Transformers' own PyTorch functions.

    Where packages with kernels are installed (flash-linear-attention, causal-conv1d), Transformers replaces these
    functions, on every device. The kernels take neither fp64 nor tensors in CPU memory.
    """
    libraries = {
        sys.modules[kind.__module__]
        for module in net.modules()
        for kind in type(module).__mro__
        if kind.__name__ in _LAYERS and kind.__module__.startswith("transformers.")
    }
    replaced = [
        (library, name, function)
        for library in libraries
        for name, function in vars(library).items()
        if name.endswith(_WITH_KERNELS)
    ]
    # Two convolutions and two delta rules each; behind another decorator the kernels would stay, silently.
    assert len(replaced) == 4 * len(libraries), [name for _, name, _ in replaced]
    assert all(hasattr(function, "__wrapped__") for _, _, function in replaced)
    try:
        for library, name, function in replaced:
            setattr(library, name, inspect.unwrap(function))
        yield
    finally:
        for library, name, function in replaced:
            setattr(library, name, function)


def weights_read_by(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module's own forward pass reads, without those of the modules that it calls."""
    own = list(module.parameters(recurse=False))
    # Linear attention reads the weight of its convolution, and does not call it.
    return [*own, *module.conv1d.parameters()] if isinstance(module, LinearAttention) else own


class LinearAttention(nn.Module):
    """Base of the layers that run per span, in front of Transformers' class."""

    conv1d: nn.Conv1d
    _z3_leaf = True
    """For DeepSpeed: ZeRO-3 gathers the layer as a whole. Gathered one by one, its parts would be gathered as often as
    they are called, which differs between ranks, and a rank would wait forever."""

    def __call__(self, hidden_states: Tensor, **others: Any) -> Any:
        """Pass the states by position, with a gradient. Backward hooks run behind the gradients of positional arguments
        only: otherwise DeepSpeed's would reduce the layer's gradients, and release its weights, before these are used.

        Behind frozen embeddings, states of the first layer have no gradient of their own.
        """
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_(any(p.requires_grad for p in self.parameters()))
        return super().__call__(hidden_states, **others)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        *,
        attention_plan: AttentionPlan | None = None,
        **others: Any,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]. Without a plan each row is one sample, and the layer that of Transformers."""
        run = super().forward
        if attention_plan is None:
            output = run(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **others)
        else:
            output = _run_spans(run, hidden_states.flatten(0, 1), attention_plan).reshape(hidden_states.shape)
        assert isinstance(output, Tensor)
        return output


@cache
def _per_span(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (LinearAttention, kind), {"__module__": __name__})


class _States:
    """The states of a batch of n spans, in the place of Transformers' cache, whose copies in place cut the graph.

    It is also the only entry of its own `layers`.
    """

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        """`conv` [n, C, k], the last k inputs of the convolution, and `recurrent` [n, H, d, d]; None at the start."""
        self._conv = conv
        self.recurrent_states = [recurrent]

    @property
    def layers(self) -> _States:
        return self

    def __getitem__(self, layer: int) -> _States:
        return self

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        return self._conv is not None

    def update_conv_state(self, inputs: Tensor, layer: int, *, conv_kernel_size: int) -> Tensor:
        """[n, C, m] inputs of the convolution -> [n, C, k + m], with those before them if there are any."""
        whole = inputs if self._conv is None else torch.cat([self._conv, inputs], dim=-1)
        missing = max(0, conv_kernel_size - whole.shape[-1])
        self._conv = nn.functional.pad(whole, (missing, 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent: Tensor, layer: int) -> None:
        self.recurrent_states[0] = recurrent

    @property
    def final(self) -> tuple[Tensor, Tensor]:
        """[n, C, k] and [n, H, d, d] after a pass."""
        conv, (recurrent,) = self._conv, self.recurrent_states
        assert conv is not None, "a pass sets both"
        assert recurrent is not None, "a pass sets both"
        return conv, recurrent


class _Batch(NamedTuple):
    """Spans that run together, n of at most m tokens; all have a parent, or none."""

    tokens: Tensor
    """[n, m] rows of the flat states. Short spans are padded behind, where a causal layer does not read it; spans that
    may be parents in front, where padding of zeros has neither keys nor values and leaves the first state at zero."""
    zeros: Tensor | None
    """[n, m] True on padding in front; None if there is none."""
    parents: Tensor | None
    """[n] index of each span's parent among the spans without one, in the order in which they run."""


class _Schedule(NamedTuple):
    batches: tuple[_Batch, ...]
    """Spans without a parent first."""
    has_parents: bool
    order: Tensor
    """[T] where each token's output is in those of the batches, laid end to end with padding."""


def _run_spans(run: Callable[..., Tensor], flat: Tensor, plan: AttentionPlan) -> Tensor:
    """Call a layer's `forward`, `run`, for all spans: [T, D] -> [T, D]."""
    schedule = _schedule(plan, flat.device)
    outputs: list[Tensor] = []
    of_parents: list[_States] = []
    for batch in schedule.batches:
        inputs = flat.index_select(0, batch.tokens.flatten()).reshape(*batch.tokens.shape, -1)
        states = None
        if batch.parents is not None:
            finals = zip(*(ended.final for ended in of_parents), strict=True)
            states = _States(*(torch.cat(parts).index_select(0, batch.parents) for parts in finals))
        elif schedule.has_parents:
            states = _States()
            of_parents.append(states)
        if batch.zeros is not None:
            inputs = inputs.masked_fill(batch.zeros[..., None], 0.0)
        outputs.append(run(inputs, cache_params=states).flatten(0, 1))
    return torch.cat(outputs).index_select(0, schedule.order)


@lru_cache(maxsize=8)
def _schedule(plan: AttentionPlan, device: torch.device) -> _Schedule:
    """Plan the batches. Cached: it is the same for all layers of a pass."""
    spans = plan.spans
    has_parents = any(span.parent is not None for span in spans)
    buckets: dict[tuple[bool, int], list[int]] = {}
    for i, span in enumerate(spans):
        buckets.setdefault((span.parent is not None, -(-span.length // _CHUNK)), []).append(i)
    batches, order = [], np.empty(plan.length, dtype=np.int64)
    place: dict[int | None, int] = {}
    num_rows = 0
    for (has_parent, _), members in sorted(buckets.items()):
        if not has_parent:
            place |= {i: len(place) + n for n, i in enumerate(members)}
        in_front = has_parents and not has_parent
        # Layers take a single token behind a state for a step of decoding, whose kernels have no gradient.
        tokens, is_real = _stack([spans[i] for i in members], min_width=1 + has_parent, in_front=in_front)
        order[tokens[is_real]] = num_rows + np.flatnonzero(is_real)
        num_rows += tokens.size
        of_parents = [place[spans[i].parent] for i in members] if has_parent else None
        batches.append(
            _Batch(
                tokens=torch.from_numpy(tokens).to(device),
                zeros=torch.from_numpy(~is_real).to(device) if in_front and not is_real.all() else None,
                parents=None if of_parents is None else torch.tensor(of_parents, device=device),
            )
        )
    return _Schedule(tuple(batches), has_parents, torch.from_numpy(order).to(device))


def _stack(spans: Sequence[Span], *, min_width: int, in_front: bool) -> tuple[Ints, Bools]:
    """Stack the rows of spans as [n, m], padded behind or in front with a row of the span, and the mask that is False
    on padding."""
    starts, lengths = (np.array(column)[:, None] for column in zip(*((s.start, s.length) for s in spans), strict=True))
    width = max(min_width, int(lengths.max()))
    offset = np.arange(width) - (width - lengths if in_front else 0)
    return starts + np.clip(offset, 0, lengths - 1), (offset >= 0) & (offset < lengths)
