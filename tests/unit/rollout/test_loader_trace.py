"""Destinations of a loader's tensors are traced by its copies, and only if it does nothing but copy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlmrl.rollout.loader_trace import LoaderTrace, parameters_by_storage


def layer() -> nn.Linear:
    return nn.Linear(3, 8, device="meta")


def traced(module: nn.Module, tensor: Tensor, load: object) -> LoaderTrace:
    with torch.no_grad(), LoaderTrace(parameters_by_storage(module), tensor) as trace:
        load()  # type: ignore[operator]
    return trace


def test_a_shard_of_a_tensor_is_traced_to_rows_of_a_fused_weight() -> None:
    module, bucket = layer(), torch.arange(50.0)
    sent = bucket[2:38].reshape(6, 6)
    # The second half of the columns, without rows 4 and 5, goes to rows 3 to 6.
    trace = traced(module, sent, lambda: module.weight.data[3:7].copy_(sent[:4].narrow(1, 3, 3)))
    (piece,) = trace.pieces
    assert (piece.parameter, piece.first_row) == ("weight", 3)
    assert torch.equal(piece.of(sent), sent[:4, 3:])
    other = torch.rand(6, 6)
    assert torch.equal(piece.of(other), other[:4, 3:]), "the next tensor has another storage"


def test_a_convolution_is_read_as_a_matrix_and_a_bias_as_one_column() -> None:
    module = nn.Conv3d(3, 4, (2, 2, 2), device="meta")
    kernel, bias = torch.rand(4, 3, 2, 2, 2), torch.rand(4)
    (piece,) = traced(module, kernel, lambda: module.weight.data.copy_(kernel)).pieces
    assert piece.of(kernel).shape == (4, 24)
    assert module.bias is not None
    (piece,) = traced(module, bias, lambda: module.bias.data.copy_(bias)).pieces  # type: ignore[union-attr]
    assert piece.of(bias).shape == (4, 1)


def test_a_parameter_that_a_loader_computes_has_no_pieces() -> None:
    module, sent = layer(), torch.rand(8, 3)

    def negated() -> None:
        module.weight.data.copy_(sent)
        module.weight.data.copy_(-module.weight.data.exp())

    assert traced(module, sent, negated).pieces == []
    assert traced(module, sent, lambda: module.weight.data.copy_(sent * 2)).pieces == []
    assert traced(module, sent, lambda: module.weight.data[:, :2].copy_(sent[:, :2])).pieces == []


def test_copies_to_other_tensors_are_ignored() -> None:
    module, sent = layer(), torch.rand(8, 3)
    (piece,) = traced(module, sent, lambda: (torch.empty(8, 3).copy_(sent), module.weight.data.copy_(sent))).pieces
    assert (piece.first_row, piece.size) == (0, (8, 3))


def test_an_expert_is_traced_to_its_rows_among_those_of_all_experts() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(3, 8, 5, device="meta"))
    sent = torch.rand(4, 5)
    (piece,) = traced(module, sent, lambda: module.weight.data[2].narrow(0, 4, 4).copy_(sent)).pieces
    assert (piece.first_row, piece.size) == (2 * 8 + 4, (4, 5))
    turned = torch.rand(5, 4)
    (piece,) = traced(module, turned, lambda: module.weight.data[1, :4].copy_(turned.T)).pieces
    assert piece.first_row == 8
    assert torch.equal(piece.of(turned), turned.T)
