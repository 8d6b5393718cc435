"""Layers of vLLM, fused, packed and sharded, are read back after a weight sync: what they hold wrongly has a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers_of_vllm import VOCAB, Worker, weights
from torch import Tensor

from vlmrl.rollout.readback import SHARE, chosen, readers
from vlmrl.rollout.reports import problem_of
from vlmrl.rollout.worker_extension import WeightUpdate

DTYPES = [torch.float32, torch.bfloat16]


def worker(dtype: torch.dtype, *, tied: bool = False, rank: int = 0, size: int = 1) -> Worker:
    """One that has had a weight sync."""
    made = Worker(tied=tied, dtype=dtype, rank=rank, size=size)
    assert problem_of([made.sync(weights(tied=tied, dtype=dtype), seed=0)]) is None
    return made


# ---------------------------------------------------------------- sound layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_what_was_sent_is_what_every_layer_holds(dtype: torch.dtype, tied: bool, rank: int, size: int) -> None:
    made = Worker(tied=tied, dtype=dtype, rank=rank, size=size)
    for seed in range(8):
        report = made.sync(weights(tied=tied, dtype=dtype), seed=seed)
        assert problem_of([report]) is None
        # Tower, embedding, twice norm, qkv, o, gate and up, and down; a head of its own.
        assert (report["readback"]["layers"], report["readback"]["unread"]) == (12 + (not tied), [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_numbers_are_no_fault(dtype: torch.dtype) -> None:
    """Negative zeros, numbers too small to be normal, infinities and what is not a number, in every tensor."""
    made = worker(dtype)
    for seed in range(8):
        sent = weights(tied=False, dtype=dtype)
        for tensor in sent.values():
            flat = tensor.reshape(-1)
            flat[:8] = torch.tensor([-0.0, 1e-39, -1e-39, torch.inf, torch.nan, -torch.inf, 3e38, 0.0]).to(dtype)
        assert problem_of([made.sync(sent, seed=seed)]) is None


def test_a_vocabulary_that_vllm_pads_is_whole_without_its_padding() -> None:
    made = worker(torch.float32)
    assert made.model.embed_tokens.num_embeddings_padded > VOCAB
    assert made.sync(weights(tied=False, dtype=torch.float32), seed=1)["missing"] == []


def test_a_sample_of_the_layers_is_another_with_each_sync_and_all_have_their_turn() -> None:
    made = worker(torch.float32)
    every = readers(made.model, ())
    layers = {path.rpartition(".")[0] for path in every}
    drawn = [
        {path.rpartition(".")[0] for path in chosen(every, {"seed": seed, "is_full": False})} for seed in range(60)
    ]
    assert {len(some) for some in drawn} == {-(-len(layers) // SHARE)}
    assert set().union(*drawn) == layers
    report = made.sync(weights(tied=False, dtype=torch.float32), seed=5, full=False)
    assert report["readback"]["layers"] == len(drawn[5])


# ---------------------------------------------------------------- planted faults


class Scales(WeightUpdate):
    """After its digest was taken."""

    def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._hand_over([(n, t * 1.01 if n == "layers.1.down_proj.weight" else t) for n, t in tensors])


class SwapsQueriesAndKeys(WeightUpdate):
    def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        other = {f"layers.0.{a}_proj.weight": f"layers.0.{b}_proj.weight" for a, b in ("qk", "kq")}
        return super()._hand_over([(other.get(n, n), t) for n, t in tensors])


class SwapsLayers(WeightUpdate):
    def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        other = {f"layers.{a}.o_proj.weight": f"layers.{b}.o_proj.weight" for a, b in ("01", "10")}
        return super()._hand_over([(other.get(n, n), t) for n, t in tensors])


class KeepsALayer(WeightUpdate):
    """Its product is that of the packed copy from before."""

    def __init__(self, *given: Any) -> None:
        self.before = given[0].layers[1].qkv_proj.cpu_linear
        super().__init__(*given)

    def close(self) -> None:
        super().close()
        self.model.layers[1].qkv_proj.cpu_linear = self.before  # type: ignore[index,union-attr]


class KeepsTheTower(WeightUpdate):
    def __init__(self, *given: Any) -> None:
        self.before = given[0].tower.weight.clone()
        super().__init__(*given)

    def close(self) -> None:
        super().close()
        self.model.tower.weight.copy_(self.before)  # type: ignore[operator,union-attr]


class LeavesTheHeadBehind(WeightUpdate):
    def close(self) -> None:
        self._tied_heads = []
        super().close()


class Empties(WeightUpdate):
    def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._hand_over([(n, torch.zeros_like(t) if "gate_proj" in n else t) for n, t in tensors])


class ChangesABias(WeightUpdate):
    def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._hand_over([(n, t.flip(0) if n == "layers.0.v_proj.bias" else t) for n, t in tensors])


FAULTS = [
    (Scales, r"layers\.1\.down_proj\.weight is scaled by 1\.0(09|1)"),
    (
        SwapsQueriesAndKeys,
        r"layers\.0\.q_proj\.weight holds another layer's weights: layers\.0\.k_proj\.weight, and 1 more",
    ),
    (SwapsLayers, r"layers\.0\.o_proj\.weight holds another layer's weights: layers\.1\.o_proj\.weight, and 1 more"),
    (KeepsALayer, r"layers\.1\.q_proj\.weight holds the weights from before, and 2 more"),
    (KeepsTheTower, r"tower\.weight holds the weights from before$"),
    (LeavesTheHeadBehind, r"embed_tokens\.weight holds the weights from before$"),
    (Empties, r"layers\.0\.gate_proj\.weight holds nothing but zeros, and 1 more"),
    (ChangesABias, r"layers\.0\.v_proj\.bias holds other numbers than were sent \(\d+\.\d% of those read\)$"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_layer_that_holds_something_else_is_named(fault: type[WeightUpdate], said: str, dtype: torch.dtype) -> None:
    tied = fault is LeavesTheHeadBehind
    made = worker(dtype, tied=tied)
    report = made.sync(weights(tied=tied, dtype=dtype), seed=1, kind=fault)
    assert (report["ignored"], report["missing"]) == ([], [])
    with pytest.raises(AssertionError, match=rf"read back from the layers, {said}"):
        raise AssertionError(problem_of([report]))
    assert problem_of([made.sync(weights(tied=tied, dtype=dtype), seed=2)]) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_stale_shard_of_two_is_found_in_its_worker(dtype: torch.dtype) -> None:
    first, second = (worker(dtype, rank=rank, size=2) for rank in (0, 1))
    sent = weights(tied=False, dtype=dtype)
    reports = [first.sync(sent, seed=1), second.sync(sent, seed=1, kind=KeepsALayer)]
    assert reports[0]["digests"] == reports[1]["digests"], "which is why nobody has seen it"
    assert problem_of(reports) == (
        "read back from the layers of worker 1, layers.1.q_proj.weight holds the weights from before, "
        "and 2 more are not as sent"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_of_the_other_worker_is_found(dtype: torch.dtype) -> None:
    """The planted fault: worker 1 takes the first half, in rows of one layer and in columns of another."""
    for layer in ("gate_up_proj", "o_proj"):
        made = worker(dtype, rank=1, size=2)

        class TakesTheFirst(WeightUpdate):
            def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
                getattr(self.model.layers[0], layer).weight.tp_rank = 0  # type: ignore[index]  # noqa: B023
                getattr(self.model.layers[0], layer).tp_rank = 0  # type: ignore[index]  # noqa: B023
                return super()._hand_over(tensors)

        report = made.sync(weights(tied=False, dtype=dtype), seed=1, kind=TakesTheFirst)
        assert report["readback"]["wrong"], layer
        assert {name.split(".")[2] for name, _ in report["readback"]["wrong"]} <= {"gate_proj", "up_proj", "o_proj"}


def test_the_first_update_of_a_step_that_few_numbers_of_bf16_follow_is_told_from_none() -> None:
    """At small learning rates a step changes one number of bf16 in a hundred, by one unit in the last place."""
    made = worker(torch.bfloat16)
    sent = weights(tied=False, dtype=torch.bfloat16)
    assert problem_of([made.sync(sent, seed=1)]) is None
    moved = {}
    for name, tensor in sent.items():
        bits = tensor.clone().view(torch.int16)
        moved[name] = torch.where(torch.rand(bits.shape) < 0.01, bits + 1, bits).view(torch.bfloat16)
    report = made.sync(moved, seed=2, kind=KeepsALayer)
    assert {said for _, said in report["readback"]["wrong"]} == {"holds the weights from before"}


def test_a_single_column_is_found_even_when_it_is_none_of_those_that_were_read() -> None:
    for column in range(32):

        class MovesAColumn(WeightUpdate):
            def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
                moved = dict(tensors)
                changed = moved["layers.0.o_proj.weight"].clone()
                changed[:, column] += 1e-3  # noqa: B023
                return super()._hand_over(list((moved | {"layers.0.o_proj.weight": changed}).items()))

        report = worker_32().sync(weights(tied=False, dtype=torch.float32), seed=column, kind=MovesAColumn)
        ((name, said),) = report["readback"]["wrong"]
        assert name == "layers.0.o_proj.weight"
        assert said.startswith("holds other numbers")


_KEPT: list[Worker] = []


def worker_32() -> Worker:
    if not _KEPT:
        _KEPT.append(worker(torch.float32))
    return _KEPT[0]
