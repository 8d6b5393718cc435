"""Read back the weights that an engine's layers hold after a weight sync, and compare them with the tensors received.

The digests of an update cover the tensors that were received. Between those and the responses are vLLM's loaders, which
fuse and shard, its re-packing for the CPU's matrix products, and the copies into the memory of CUDA graphs. So each
linear layer, as it is held, is applied to one-hot vectors: the products are columns of its weight and are compared bit
for bit. One vector of signs, compared within rounding, covers all the other columns at once. Alone it is not enough: in
bf16 a step at a small learning rate changes the product by less than its rounding. Embeddings, norms, convolutions and
biases are read directly.

The chain has no gap: the expected columns come from the tensor in the worker's memory whose digest enters the
fingerprint that the trainer compares with its own weights. The driver draws new columns for each weight sync.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vlmrl.rollout import fp8_rows
from vlmrl.rollout.expert_rows import expert_product
from vlmrl.rollout.loader_trace import LoaderTrace, Piece, parameters_by_storage
from vlmrl.rollout.reports import ReadbackPlan, ReadbackReport
from vlmrl.rollout.row_check import SentRows, describe_mismatch

COLUMNS = 7
"""Columns of each weight that are read. With the vector of signs, each product has eight rows."""
SAMPLE_EVERY = 8
"""A sample is one layer out of this many."""

Places = dict[str, tuple[Piece, ...]]
"""Received tensor -> where it goes, traced when it was first loaded."""


class ProbeInputs(NamedTuple):
    """Inputs for all weights of one width, [rows of x, width]."""

    columns: Tensor
    x: Tensor


class ExpectedRows(NamedTuple):
    """Expected rows of a parameter, from a received tensor."""

    name: str
    """Of the tensor in the checkpoint."""
    first_row: int
    values: SentRows


class Readback:
    """The read-back of one update."""

    def __init__(
        self, model: nn.Module, plan: ReadbackPlan, places: Places, tied_heads: Iterable[ParallelLMHead]
    ) -> None:
        """Create before the update begins: what the layers hold then distinguishes stale weights from wrong ones.

        Args:
            places: filled here; with it the next update of the same model need not trace the loaders.
        """
        started = time.perf_counter()
        self._plan, self._places = plan, places
        self._storages: dict[int, tuple[str, Tensor]] = {}
        self._model = model
        self._inputs_by_width: dict[tuple[int, torch.dtype, torch.device], ProbeInputs] = {}
        readable = find_readers(model, tied_heads)
        self._readable = readable.keys()
        self._readers = select_readers(readable, plan)
        self._expected: dict[str, list[ExpectedRows]] = {}
        self._before = {path: self._held(path) for path in self._readers}
        self._seconds = time.perf_counter() - started

    @contextmanager
    def trace_loading(self, name: str, tensor: Tensor) -> Iterator[None]:
        """Trace where the tensor goes while vLLM loads it within the context; then record its expected rows."""
        if not self._storages:
            self._storages = parameters_by_storage(self._model)
        with LoaderTrace(self._storages, tensor) as trace:
            yield
        self._places[name] = tuple(trace.pieces)
        self.record([(name, tensor)])

    def has_places(self, named: Iterable[tuple[str, Tensor]]) -> bool:
        """Whether it is known where all these tensors go."""
        return all(name in self._places for name, _ in named)

    @torch.no_grad()
    def record(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Record what the layers of these tensors will be compared with: 8 numbers and the norm of each row."""
        started = time.perf_counter()
        for name, tensor in named:
            self._record(name, tensor)
        self._seconds += time.perf_counter() - started

    def _record(self, name: str, tensor: Tensor) -> None:
        for piece in self._places[name]:
            if piece.parameter in self._readers:
                reader = self._readers[piece.parameter]
                part = piece.of(tensor).to(reader.dtype)
                part = part if reader.round is None else reader.round(part)
                inputs = self._probe_inputs(part.shape[1], part.dtype, part.device)
                values = SentRows(
                    columns=part[:, inputs.columns].T.contiguous(),
                    signs=F.linear(inputs.x[-1:], part)[0],
                    norms=torch.linalg.vector_norm(part, dim=1, dtype=torch.float32),
                    width=part.shape[1],
                )
                self._expected.setdefault(piece.parameter, []).append(ExpectedRows(name, piece.first_row, values))

    @torch.no_grad()
    def report(self, *, elsewhere: Iterable[str] = ()) -> ReadbackReport:
        """Read the selected layers after the update, and report those that differ from what was sent.

        `elsewhere` are tensors that only other stages of the pipeline hold.
        """
        started = time.perf_counter()
        absent = set(elsewhere)
        wrong: dict[str, str] = {}
        for path, parts in self._expected.items():
            for held, before in zip(self._held(path), self._before[path], strict=True):
                for part in parts:
                    mismatch = self._compare(part, held, before)
                    if mismatch is not None:
                        wrong.setdefault(part.name, mismatch)
        return {
            "layers": len({path.rpartition(".")[0] for path in self._expected}),
            "unread": [
                name
                for name, pieces in self._places.items()
                if name not in absent and (not pieces or any(piece.parameter not in self._readable for piece in pieces))
            ],
            "wrong": [[name, mismatch] for name, mismatch in wrong.items()],
            "seconds": self._seconds + time.perf_counter() - started,
        }

    def _compare(self, part: ExpectedRows, held: Tensor, before: Tensor) -> str | None:
        rows = slice(part.first_row, part.first_row + len(part.values.signs))
        others = (other for parts in self._expected.values() for other in parts if other is not part)
        return describe_mismatch(
            held[:, rows],
            part.values,
            before=before[:, rows],
            others=(("" if other.name == part.name else other.name, other.values.columns) for other in others),
        )

    def _held(self, path: str) -> list[Tensor]:
        """Return the product by each user of the parameter, [rows of x, rows of the parameter], on the CPU."""
        reader = self._readers[path]
        inputs = self._probe_inputs(reader.width, reader.dtype, reader.device)
        with exact_products():
            return [multiply(inputs.x).cpu() for multiply in reader.products]

    def _probe_inputs(self, width: int, dtype: torch.dtype, device: torch.device) -> ProbeInputs:
        """Return the same inputs for all weights of a width, so that swapped weights are recognized by their
        columns."""
        key = width, dtype, device
        if key not in self._inputs_by_width:
            generator = torch.Generator().manual_seed((self._plan["seed"] * 2_654_435_761 + width) % 2**63)
            columns = torch.randperm(width, generator=generator)[:COLUMNS]
            signs = torch.randint(0, 2, (1, width), generator=generator) * 2 - 1
            x = torch.cat([F.one_hot(columns, width), signs])
            self._inputs_by_width[key] = ProbeInputs(columns.to(device), x.to(device, dtype))
        return self._inputs_by_width[key]


class Reader(NamedTuple):
    """A parameter and the functions that read it."""

    width: int
    """Columns of the parameter as a matrix: the product of its dimensions after the first."""
    dtype: torch.dtype
    device: torch.device
    products: list[Callable[[Tensor], Tensor]]
    """Each multiplies x, [rows of x, width], with the parameter as one user of it holds it."""
    round: Callable[[Tensor], Tensor] | None = None
    """Rounds rows that were sent to those that the layer holds; None where it holds them as they are."""


def find_readers(model: nn.Module, tied_heads: Iterable[ParallelLMHead]) -> dict[str, Reader]:
    """Path -> reader, for all parameters of vLLM's model but weights of quantized layers, other than FP8 rows, and of
    experts in a layout that `expert_product` does not know.
    """
    heads: dict[int, list[nn.Module]] = {}
    for head in tied_heads:
        heads.setdefault(id(head.weight), []).append(head)
    readers: dict[str, Reader] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            products: list[Callable[[Tensor], Tensor]] = []
            width = math.prod(parameter.shape[1:])
            if (experts := expert_product(module, name)) is not None:
                width, products = experts[0], [experts[1]]
            elif isinstance(module, LinearBase) and name == "weight":
                width = int(getattr(module, "input_size_per_partition", module.input_size))
                if type(module.quant_method) is UnquantizedLinearMethod:
                    products = [_applied(module) if _is_matrix(module) else _convolved(module)]
                elif fp8_rows.is_fp8(module):
                    readers[f"{path}.{name}"] = _fp8_reader(module, width)
                    continue
            elif (not _is_transformed(module) or (name == "bias" and fp8_rows.is_fp8(module))) and parameter.dim():
                products = [_direct(module, name)]
                if isinstance(module, VocabParallelEmbedding) and name == "weight":
                    users = [module] if isinstance(module, ParallelLMHead) else []
                    products += [_applied(user) for user in (*users, *heads.get(id(parameter), ()))]
            if products and width:
                readers[f"{path}.{name}" if path else name] = Reader(width, parameter.dtype, parameter.device, products)
    return readers


def _fp8_reader(layer: Any, width: int) -> Reader:
    return Reader(width, layer.orig_dtype, layer.weight.device, [fp8_rows.product(layer)], fp8_rows.rounded)


def _is_transformed(module: nn.Module) -> bool:
    """Whether vLLM holds the module's parameters in another format than that of the checkpoint."""
    method = getattr(module, "quant_method", None)
    return not (method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))


def _applied(layer: Any) -> Callable[[Tensor], Tensor]:
    """Multiply with the layer's weight as it is held, without the bias, which is read separately."""
    return lambda x: layer.quant_method.apply(layer, x, None)


def _is_matrix(layer: LinearBase) -> bool:
    """Whether a linear layer is one: vLLM also makes the short convolutions of linear attention of this class."""
    return layer.weight.dim() < 3 and not _is_packed_convolution(layer)


def _is_packed_convolution(layer: LinearBase) -> bool:
    """Whether the weight is that of a convolution, [channels, 1, taps], in the format of vLLM's kernel for CPUs."""
    return getattr(layer, "_cpu_unpacked_conv_weight", None) is not None


def _convolved(layer: Any) -> Callable[[Tensor], Tensor]:
    """Multiply with the taps of a causal convolution: each row of x is a sequence, whose last output is the product."""

    def read(x: Tensor) -> Tensor:
        if not _is_packed_convolution(layer):
            return _direct(layer, "weight")(x)
        rows, taps = x.shape
        channels = len(layer.weight)
        outputs = ops.causal_conv1d_fwd_cpu(
            x=x.reshape(-1, 1).repeat(1, channels).T,
            weight=layer.weight,
            bias=None,
            conv_states=x.new_zeros(rows, taps - 1, channels).transpose(1, 2),
            query_start_loc=torch.arange(0, rows * taps + 1, taps, dtype=torch.int32),
            cache_indices=torch.arange(rows, dtype=torch.int32),
            has_initial_state=torch.zeros(rows, dtype=torch.bool),
            silu_activation=False,
            is_weight_packed=True,
        )
        last: Tensor = outputs[:, taps - 1 :: taps]
        return last.T

    return read


def _direct(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """Multiply with the parameter itself."""

    def read(x: Tensor) -> Tensor:
        parameter = getattr(module, name)
        matrix: Tensor = parameter.reshape(len(parameter), -1)
        return F.linear(x.to(matrix.dtype), matrix)

    return read


def select_readers(readers: Mapping[str, Reader], plan: ReadbackPlan) -> dict[str, Reader]:
    """Return the readers of this sync: all, or those of one layer in `SAMPLE_EVERY`, drawn by the seed."""
    if plan["is_full"]:
        return dict(readers)
    layers = {path.rpartition(".")[0] for path in readers}
    shuffled = sorted(layers, key=lambda layer: xxhash.xxh3_64_intdigest(f"{plan['seed']}|{layer}".encode()))
    sample = set(shuffled[: -(-len(layers) // SAMPLE_EVERY)])
    return {path: reader for path, reader in readers.items() if path.rpartition(".")[0] in sample}


@contextmanager
def exact_products() -> Iterator[None]:
    """Context without rounding of fp32 products to TF32 (which VLLM_FLOAT32_MATMUL_PRECISION may enable)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
