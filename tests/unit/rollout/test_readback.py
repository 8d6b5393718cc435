"""Read-back of vLLM's fused, packed and sharded layers: planted faults are found and named."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from layers_of_vllm import VOCAB, Worker, weights
from torch import Tensor

from vlmrl.rollout.readback import SAMPLE_EVERY, find_readers, select_readers
from vlmrl.rollout.reports import find_problem
from vlmrl.rollout.worker_extension import WeightUpdate

DTYPES = [torch.float32, torch.bfloat16]


def worker(dtype: torch.dtype, *, tied: bool = False, rank: int = 0, size: int = 1) -> Worker:
    """A worker after one weight sync."""
    replica = Worker(tied=tied, dtype=dtype, rank=rank, size=size)
    assert find_problem([replica.sync(weights(tied=tied, dtype=dtype), seed=0)]) is None
    return replica


# ---- correct layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_all_layers_hold_what_was_sent(dtype: torch.dtype, tied: bool, rank: int, size: int) -> None:
    replica = Worker(tied=tied, dtype=dtype, rank=rank, size=size)
    for seed in range(8):
        report = replica.sync(weights(tied=tied, dtype=dtype), seed=seed)
        assert find_problem([report]) is None
        # Tower, convolution and embedding; twice norm, qkv, o, gate_up and down; an untied head.
        assert (report["readback"]["layers"], report["readback"]["unread"]) == (13 + (not tied), [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers_are_no_fault(dtype: torch.dtype) -> None:
    """Negative zeros, subnormal numbers, infinities and NaN, in every tensor."""
    replica = worker(dtype)
    for seed in range(8):
        sent = weights(tied=False, dtype=dtype)
        for tensor in sent.values():
            flat = tensor.reshape(-1)
            flat[:8] = torch.tensor([-0.0, 1e-39, -1e-39, torch.inf, torch.nan, -torch.inf, 3e38, 0.0]).to(dtype)
        assert find_problem([replica.sync(sent, seed=seed)]) is None


def test_a_padded_vocabulary_is_complete_without_its_padding() -> None:
    replica = worker(torch.float32)
    assert replica.model.embed_tokens.num_embeddings_padded > VOCAB
    assert replica.sync(weights(tied=False, dtype=torch.float32), seed=1)["missing"] == []


def test_samples_differ_between_syncs_and_cover_all_layers() -> None:
    replica = worker(torch.float32)
    readers = find_readers(replica.model, ())
    layers = {path.rpartition(".")[0] for path in readers}
    samples = [
        {path.rpartition(".")[0] for path in select_readers(readers, {"seed": seed, "is_full": False})}
        for seed in range(60)
    ]
    assert {len(sample) for sample in samples} == {-(-len(layers) // SAMPLE_EVERY)}
    assert set().union(*samples) == layers
    report = replica.sync(weights(tied=False, dtype=torch.float32), seed=5, full=False)
    assert report["readback"]["layers"] == len(samples[5])


# ---- planted faults


class Scales(WeightUpdate):
    """Scales a tensor after its digest was computed."""

    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._load_into_model([(n, t * 1.01 if n == "layers.1.down_proj.weight" else t) for n, t in tensors])


class SwapsQueriesAndKeys(WeightUpdate):
    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        other = {f"layers.0.{a}_proj.weight": f"layers.0.{b}_proj.weight" for a, b in ("qk", "kq")}
        return super()._load_into_model([(other.get(n, n), t) for n, t in tensors])


class SwapsLayers(WeightUpdate):
    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        other = {f"layers.{a}.o_proj.weight": f"layers.{b}.o_proj.weight" for a, b in ("01", "10")}
        return super()._load_into_model([(other.get(n, n), t) for n, t in tensors])


class KeepsALayer(WeightUpdate):
    """Keeps the packed copy of the old weights."""

    def __init__(self, *args: Any) -> None:
        self.before = args[0].layers[1].qkv_proj.cpu_linear
        super().__init__(*args)

    def close(self) -> None:
        super().close()
        self.model.layers[1].qkv_proj.cpu_linear = self.before  # type: ignore[index,union-attr]


class KeepsTheTower(WeightUpdate):
    def __init__(self, *args: Any) -> None:
        self.before = args[0].tower.weight.clone()
        super().__init__(*args)

    def close(self) -> None:
        super().close()
        self.model.tower.weight.copy_(self.before)  # type: ignore[operator,union-attr]


class KeepsTheConvolution(WeightUpdate):
    def __init__(self, *args: Any) -> None:
        self.before = args[0].conv1d.weight.clone()
        super().__init__(*args)

    def close(self) -> None:
        super().close()
        self.model.conv1d.weight.copy_(self.before)  # type: ignore[operator,union-attr]


class SwapsTaps(WeightUpdate):
    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._load_into_model([(n, t.flip(2) if n == "conv1d.weight" else t) for n, t in tensors])


class LeavesTheHeadBehind(WeightUpdate):
    def close(self) -> None:
        self._tied_heads = []
        super().close()


class Empties(WeightUpdate):
    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._load_into_model([(n, torch.zeros_like(t) if "gate_proj" in n else t) for n, t in tensors])


class ChangesABias(WeightUpdate):
    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._load_into_model([(n, t.flip(0) if n == "layers.0.v_proj.bias" else t) for n, t in tensors])


FAULTS = [
    (Scales, r"layers\.1\.down_proj\.weight is scaled by 1\.0(09|1)"),
    (
        SwapsQueriesAndKeys,
        r"layers\.0\.q_proj\.weight holds another layer's weights: layers\.0\.k_proj\.weight, and 1 more",
    ),
    (SwapsLayers, r"layers\.0\.o_proj\.weight holds another layer's weights: layers\.1\.o_proj\.weight, and 1 more"),
    (KeepsALayer, r"layers\.1\.q_proj\.weight holds the weights from before, and 2 more"),
    (KeepsTheTower, r"tower\.weight holds the weights from before$"),
    (KeepsTheConvolution, r"conv1d\.weight holds the weights from before$"),
    (SwapsTaps, r"conv1d\.weight holds (its own rows in another order|other numbers)"),
    (LeavesTheHeadBehind, r"embed_tokens\.weight holds the weights from before$"),
    (Empties, r"layers\.0\.gate_proj\.weight holds nothing but zeros, and 1 more"),
    (ChangesABias, r"layers\.0\.v_proj\.bias holds other numbers than were sent \(\d+\.\d% of those read\)$"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fault", "mismatch"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_wrong_layer_is_named_with_what_it_holds(
    fault: type[WeightUpdate], mismatch: str, dtype: torch.dtype
) -> None:
    tied = fault is LeavesTheHeadBehind
    replica = worker(dtype, tied=tied)
    report = replica.sync(weights(tied=tied, dtype=dtype), seed=1, kind=fault)
    assert (report["ignored"], report["missing"]) == ([], [])
    with pytest.raises(AssertionError, match=rf"read back from the layers, {mismatch}"):
        raise AssertionError(find_problem([report]))
    assert find_problem([replica.sync(weights(tied=tied, dtype=dtype), seed=2)]) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_stale_shard_of_two_is_found_in_its_worker(dtype: torch.dtype) -> None:
    first, second = (worker(dtype, rank=rank, size=2) for rank in (0, 1))
    sent = weights(tied=False, dtype=dtype)
    reports = [first.sync(sent, seed=1), second.sync(sent, seed=1, kind=KeepsALayer)]
    assert reports[0]["digests"] == reports[1]["digests"], "digests alone do not show it"
    assert find_problem(reports) == (
        "read back from the layers of worker 1, layers.1.q_proj.weight holds the weights from before, "
        "and 2 more are not as sent"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shard_of_another_worker_is_found(dtype: torch.dtype) -> None:
    """The fault: worker 1 loads the first half, in rows of one layer and in columns of another."""
    for layer in ("gate_up_proj", "o_proj"):
        replica = worker(dtype, rank=1, size=2)

        class LoadsTheFirstShard(WeightUpdate):
            def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
                getattr(self.model.layers[0], layer).weight.tp_rank = 0  # type: ignore[index]  # noqa: B023
                getattr(self.model.layers[0], layer).tp_rank = 0  # type: ignore[index]  # noqa: B023
                return super()._load_into_model(tensors)

        report = replica.sync(weights(tied=False, dtype=dtype), seed=1, kind=LoadsTheFirstShard)
        assert report["readback"]["wrong"], layer
        assert {name.split(".")[2] for name, _ in report["readback"]["wrong"]} <= {"gate_proj", "up_proj", "o_proj"}


def test_a_stale_layer_is_found_when_the_step_changed_few_numbers_of_bf16() -> None:
    """At small learning rates a step changes one number in a hundred, by one unit in the last place."""
    replica = worker(torch.bfloat16)
    sent = weights(tied=False, dtype=torch.bfloat16)
    assert find_problem([replica.sync(sent, seed=1)]) is None
    stepped = {}
    for name, tensor in sent.items():
        bits = tensor.clone().view(torch.int16)
        stepped[name] = torch.where(torch.rand(bits.shape) < 0.01, bits + 1, bits).view(torch.bfloat16)
    report = replica.sync(stepped, seed=2, kind=KeepsALayer)
    assert {mismatch for _, mismatch in report["readback"]["wrong"]} == {"holds the weights from before"}


def test_a_single_changed_column_is_found_even_if_it_was_not_read() -> None:
    for column in range(32):

        class MovesAColumn(WeightUpdate):
            def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
                moved = dict(tensors)
                changed = moved["layers.0.o_proj.weight"].clone()
                changed[:, column] += 1e-3  # noqa: B023
                return super()._load_into_model(list((moved | {"layers.0.o_proj.weight": changed}).items()))

        report = worker_32().sync(weights(tied=False, dtype=torch.float32), seed=column, kind=MovesAColumn)
        ((name, mismatch),) = report["readback"]["wrong"]
        assert name == "layers.0.o_proj.weight"
        assert mismatch.startswith("holds other numbers")


@cache
def worker_32() -> Worker:
    return worker(torch.float32)
