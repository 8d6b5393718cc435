"""Sequence parallelism: the ranks of a group share the tokens of every row (Ulysses, arXiv:2309.14509).

Each rank holds a slice of the columns, from the embeddings to the log-probs. In attention the ranks exchange tokens for
heads: each attends over all tokens with its share of the heads, and the outputs are exchanged back. So the attention
plan is that of the whole pack, and every kernel works unchanged.

Values per token are then summed over the group, and every rank computes the whole loss. Its gradient covers the rank's
own tokens; the gradients of the group's ranks add up to that of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.attention import isolates_samples
from vlmrl.models.linear_attention import state_of


class SequenceGroup(NamedTuple):
    """S ranks that share the tokens of their passes."""

    handle: torch.distributed.ProcessGroup
    rank: int
    """Number of this rank in the group."""
    size: int
    """S"""


def check_sequence_parallel(net: PreTrainedModel, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share the tokens of this model's passes."""
    check_divisible(net, size)
    if not isolates_samples(net):
        raise ConfigError(
            f"ds.sequence_parallel_size {size} needs ds.attn_implementation auto: with others, tokens attend to other "
            "samples"
        )


def check_divisible(net: PreTrainedModel, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share the layers of this kind of model, which may be a skeleton."""
    flag, name = f"ds.sequence_parallel_size {size}", type(net).__name__
    if (state := state_of(net)) is not None:
        raise ConfigError(f"{flag}: {name} has {state}, which pass a state from token to token: use 1")
    if (rope := _rope_of_length(net.config.get_text_config())) is not None:
        raise ConfigError(
            f"{flag}: the positions of {name} ({rope}) depend on the longest sequence, of which each rank sees a part: "
            "use 1"
        )
    heads = int(net.config.get_text_config().num_attention_heads)
    if heads % size:
        sizes = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ConfigError(f"{flag} does not divide the {heads} attention heads of {name}: use one of {sizes}")


def _rope_of_length(config: Any) -> str | None:
    """Return the type of rotary embedding whose frequencies depend on the length of a sequence; None for others."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    return next((kind for kind in kinds if kind in ("longrope", "dynamic")), None)


@contextmanager
def sliced_inputs(net: PreTrainedModel, shard: SequenceShard) -> Iterator[None]:
    """Context in which the language model gets only this rank's slice, and drops out other channels than other ranks.

    Embeddings are sliced after the images have been put into them, and so are the features that a vision tower adds to
    deeper layers.
    """

    def hook(module: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, inputs | shard.inputs(inputs)

    handle = net.base_model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with _own_random_numbers(shard.group, net.device):
            yield
    finally:
        handle.remove()


@contextmanager
def _own_random_numbers(group: SequenceGroup, device: torch.device) -> Iterator[None]:
    """Context in which each rank of a group draws random numbers of its own, for dropout.

    The ranks have the same generator, and its masks would repeat in every slice. They need it outside: all of them
    compute the same vision tower. So a number drawn from it, plus the rank, seeds the generators within the context.
    """
    number = int(torch.randint(2**32, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(number + group.rank)
        yield


@dataclass(eq=False)
class SequenceShard:
    """One rank's part of a pass over rows of T tokens: columns `rank * width` to `(rank + 1) * width`, padded."""

    group: SequenceGroup
    length: int
    """T"""
    num_exchanges: int = 0
    """Attention layers that have exchanged their tokens."""

    @property
    def width(self) -> int:
        """Columns of each rank."""
        return -(-self.length // self.group.size)

    def check_exchanges(self, net: PreTrainedModel) -> None:
        """Raise ConfigError if the attention of a layer has seen this rank's tokens only, after a forward pass."""
        layers = int(net.config.get_text_config().num_hidden_layers)
        if self.num_exchanges != layers:
            raise ConfigError(
                f"ds.sequence_parallel_size {self.group.size}: {self.num_exchanges} of the {layers} layers of "
                f"{type(net).__name__} attend to the tokens of other ranks: use 1"
            )

    def take(self, values: Tensor, dim: int) -> Tensor:
        """Slice dimension `dim` of T columns to this rank's, padded with zeros."""
        start = min(self.group.rank * self.width, self.length)
        own = values.narrow(dim, start, min(self.width, self.length - start))
        missing = self.width - own.shape[dim]
        if not missing:
            # A view would keep all columns in memory until the backward pass.
            return own.clone()
        blank = own.new_zeros([missing if d == dim % own.ndim else size for d, size in enumerate(own.shape)])
        return torch.cat([own, blank], dim)

    def inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Slice the arguments of a language model's forward pass."""
        dims = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "visual_pos_masks": 1}
        sliced: dict[str, Any] = {
            name: self.take(inputs[name], dim) for name, dim in dims.items() if inputs.get(name) is not None
        }
        # Only padding on the right is masked, to which no token attends.
        sliced["attention_mask"] = None
        if inputs.get("deepstack_visual_embeds") is not None:
            is_image = inputs["visual_pos_masks"]
            number = (is_image.flatten().cumsum(0) - 1).view_as(is_image)
            rows = self.take(number, 1)[sliced["visual_pos_masks"]]
            sliced["deepstack_visual_embeds"] = [level[rows] for level in inputs["deepstack_visual_embeds"]]
        return sliced

    def owned(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """For `index` [n] into [B * T]: which of them this rank has, [n] bool, and their places in its [B * width]."""
        column = index % self.length
        is_own = column // self.width == self.group.rank
        return is_own, (index // self.length * self.width + column % self.width)[is_own]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange tokens for heads: [B, H, width, d] -> [B, H / S, T, d], and key and value of Hkv heads likewise.

        Where S does not divide Hkv, each key and value head is repeated as often as necessary.
        """
        self.num_exchanges += 1
        size = self.group.size
        repeats = math.lcm(key.shape[1], size) // key.shape[1]
        by_token = [states.transpose(1, 2) for states in (query, key, value)]
        if repeats > 1:
            by_token[1:] = [states.repeat_interleave(repeats, dim=2) for states in by_token[1:]]
        heads = [states.shape[2] // size for states in by_token]
        chunks = torch.cat([states.unflatten(2, (size, -1)) for states in by_token], dim=3).movedim(2, 0)
        received = self._exchange(chunks).movedim(0, 1).flatten(1, 2)[:, : self.length]
        q, k, v = received.transpose(1, 2).split(heads, dim=1)
        return q, k, v

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange heads for tokens: [B, T, H / S, d] -> [B, width, H, d]."""
        size = self.group.size
        padding = size * self.width - self.length
        whole = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, padding)) if padding else output
        return self._exchange(whole.unflatten(1, (size, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)

    def gather(self, values: Tensor, is_own: Tensor) -> Tensor:
        """Return the values [n] of all ranks, from those of this rank's tokens, which `is_own` [n] marks.

        The gradient of a rank's values is that of its own loss, which is the whole loss on every rank.
        """
        whole = torch.zeros(is_own.shape, dtype=values.dtype, device=values.device).masked_scatter(is_own, values)
        return sum_once(whole, self.group)

    def _exchange(self, chunks: Tensor) -> Tensor:
        """[S, ...] -> [S, ...]: chunk i goes to rank i."""
        received: Tensor = _Exchange.apply(chunks, self.group)  # type: ignore[no-untyped-call]
        return received


def sum_once(values: Tensor, group: SequenceGroup) -> Tensor:
    """Sum values over the ranks of a group, each of which computes the whole loss from the sums: the gradient of a
    rank's values is that of its own loss. A collective."""
    summed: Tensor = _SumOnce.apply(values, group)  # type: ignore[no-untyped-call]
    return summed


class _Exchange(torch.autograd.Function):
    """All-to-all of the first dimension, which is its own inverse and transpose."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(chunks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], ctx.group), None


class _SumOnce(torch.autograd.Function):
    """Sum over the ranks, each of which computes the same from it: so the gradients are equal, and not summed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        summed = values.clone()
        torch.distributed.all_reduce(summed, group=group.handle)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _all_to_all(chunks: Tensor, group: SequenceGroup) -> Tensor:
    sent = chunks.contiguous()
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group.handle)
    return received
