"""Expert parallelism: each rank of a group holds a share of every layer's experts (GShard, arXiv:2006.16668).

A rank routes its own tokens. Each token travels to the ranks that hold its experts, and the outputs travel back, where
they are weighed and added. So routers, their loss and routing replay are those of one rank, and the gradient of a
rank's experts covers the tokens of the whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from vlmrl.errors import ConfigError
from vlmrl.models.quantize import true_shape


class ExpertGroup(NamedTuple):
    """S ranks that share the experts of their model."""

    handle: torch.distributed.ProcessGroup
    rank: int
    """Number of this rank in the group: it holds experts `rank * E / S` to `(rank + 1) * E / S`."""
    size: int
    """S"""


def expert_layers(net: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the experts of a layer, each of their parameters for all experts: none once they
    are shared."""
    return [module for module in net.modules() if _num_experts(module)]


def check_expert_parallel(net: nn.Module, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share the experts of this model, which may be a skeleton."""
    for module in expert_layers(net):
        number = _num_experts(module)
        if number % size:
            sizes = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ConfigError(
                f"ds.expert_parallel_size {size} does not divide the {number} experts of a layer: use one of {sizes}"
            )


def share_experts(module: nn.Module, group: ExpertGroup, parameters: dict[str, nn.Parameter]) -> None:
    """Give an expert layer this rank's share of its `parameters`, [E / S, ...] each, and exchange tokens in its passes.

    Call it once per layer of `expert_layers`.
    """
    experts: Any = module
    for name, parameter in parameters.items():
        parameter.whole_shape = true_shape(experts._parameters[name])  # type: ignore[attr-defined]
        parameter.expert_group = group  # type: ignore[attr-defined]
        experts._parameters[name] = parameter
    experts.num_experts //= group.size
    experts.forward = _Exchanged(experts.forward, group, experts.num_experts)


def is_shared(parameter: Tensor) -> bool:
    """Whether the parameter is a rank's share of a layer's experts."""
    return hasattr(parameter, "expert_group")


@contextmanager
def whole_experts(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Put the experts of all ranks into the parameters within the context, on every rank. A collective of the group.

    For reading only.
    """
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        group: ExpertGroup = parameter.expert_group  # type: ignore[attr-defined]
        share = parameter.data.contiguous()
        shares = [torch.empty_like(share) for _ in range(group.size)]
        torch.distributed.all_gather(shares, share, group=group.handle)
        parameter.data = torch.cat(shares)
    try:
        yield
    finally:
        for parameter, share in zip(parameters, kept, strict=True):
            parameter.data = share


class _Exchanged:
    """The forward pass of a layer whose experts are spread over the ranks."""

    def __init__(self, compute: Callable[..., Tensor], group: ExpertGroup, num_own: int) -> None:
        """`compute` applies this rank's `num_own` experts."""
        self._compute, self._group, self._num_own = compute, group, num_own

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts `top_k_index` [N, K] to N tokens [N, D], add them by `top_k_weights` [N, K]: [N, D]."""
        tokens, (number, per_token) = hidden_states, top_k_index.shape
        experts, order = top_k_index.flatten().sort(stable=True)
        sent = torch.bincount(experts, minlength=self._num_own * self._group.size).view(self._group.size, -1)
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=self._group.handle)
        to_ranks, from_ranks = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        rows = _AllToAll.apply(  # type: ignore[no-untyped-call]
            tokens[order // per_token], to_ranks, from_ranks, self._group
        )
        own = torch.arange(self._num_own, device=tokens.device).repeat(self._group.size)
        own = own.repeat_interleave(received.flatten())
        # One more row, so that a rank whose experts nobody chose takes part in the backward pass.
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        outputs = self._compute(rows, nn.functional.pad(own, (0, 1))[:, None], rows.new_ones(len(rows), 1))[:-1]
        outputs = _AllToAll.apply(  # type: ignore[no-untyped-call]
            outputs, from_ranks, to_ranks, self._group
        )
        by_choice = outputs[order.argsort()] * top_k_weights.flatten()[:, None]
        return by_choice.view(number, per_token, -1).sum(1).to(tokens.dtype)


class _AllToAll(torch.autograd.Function):
    """Send runs of rows to the ranks of a group; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], of: list[int], group: ExpertGroup) -> Tensor:
        ctx.to, ctx.of, ctx.group = to, of, group
        return _all_to_all(rows, to, of, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], ctx.of, ctx.to, ctx.group), None, None, None


def _all_to_all(rows: Tensor, to: list[int], of: list[int], group: ExpertGroup) -> Tensor:
    received = rows.new_empty(sum(of), rows.shape[1])
    torch.distributed.all_to_all_single(received, rows.contiguous(), of, to, group=group.handle)
    return received


def _num_experts(module: nn.Module) -> int:
    """Number of experts that the module holds; 0 if it holds none."""
    number = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(number, int) or not own or any(len(true_shape(p)) < 2 for p in own):
        return 0
    return number if hasattr(module, "_is_expert_parallel") and all(true_shape(p)[0] == number for p in own) else 0
