"""What the layers of an engine hold after a weight sync, read back from them and compared with what came.

The digests of an update are of the tensors that were received. Between them and the answers lie vLLM's loaders, which
fuse and shard, its re-packing for the CPU's matrix products, and the copies into the memory that CUDA graphs know. So
each linear layer is applied, as it is held, to one-hot vectors: the products are columns of its weight and are compared
bit for bit. One vector of signs, compared within rounding, looks at all the other columns at once; in bf16 it alone
would not do, for a step at a small learning rate moves the product by less than its rounding. Embeddings, norms,
convolutions and biases are read directly.

The chain is whole: what a layer is compared with is taken from the same tensor, in the worker's memory, whose digest
enters the fingerprint that the trainer compares with its own weights. The driver draws the columns anew for each
weight sync, so no engine is lucky twice.
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
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vlmrl.rollout.loader_trace import LoaderTrace, Piece, parameters_by_storage
from vlmrl.rollout.reports import ReadbackPlan, ReadbackReport
from vlmrl.rollout.row_check import Values, verdict

COLUMNS = 7
"""Columns of each weight that are read; with the vector of signs a product of eight rows."""
SHARE = 8
"""Of the layers, one in so many is read where not all are."""

Places = dict[str, tuple[Piece, ...]]
"""Where each received tensor goes, learnt when it came for the first time."""


class Question(NamedTuple):
    """What every weight of one width is asked, [rows of x, width]."""

    columns: Tensor
    x: Tensor


class Expected(NamedTuple):
    """What rows of a parameter must hold, by the tensor that was received."""

    name: str
    """The tensor's, in the checkpoint."""
    first_row: int
    values: Values


class Readback:
    """The read-back of one update."""

    def __init__(
        self, model: nn.Module, plan: ReadbackPlan, places: Places, tied_heads: Iterable[ParallelLMHead]
    ) -> None:
        """Call before the update begins: what the layers hold until then tells stale weights from wrong ones.

        `places` is filled. Hand it to the next update of the same model, which then need not watch the loaders.
        """
        started = time.perf_counter()
        self._plan, self._places = plan, places
        self._storages: dict[int, tuple[str, Tensor]] = {}
        self._model = model
        self._questions: dict[tuple[int, torch.dtype, torch.device], Question] = {}
        readable = readers(model, tied_heads)
        self._readable = readable.keys()
        self._readers = chosen(readable, plan)
        self._expected: dict[str, list[Expected]] = {}
        self._before = {path: self._held(path) for path in self._readers}
        self._seconds = time.perf_counter() - started

    @contextmanager
    def watching(self, name: str, tensor: Tensor) -> Iterator[None]:
        """Within the context, while vLLM loads the tensor, learn where it goes; afterwards, keep what it is read by."""
        if not self._storages:
            self._storages = parameters_by_storage(self._model)
        with LoaderTrace(self._storages, tensor) as trace:
            yield
        self._places[name] = tuple(trace.pieces)
        self.keep([(name, tensor)])

    def knows(self, named: Iterable[tuple[str, Tensor]]) -> bool:
        """Whether it is known where all of them go."""
        return all(name in self._places for name, _ in named)

    @torch.no_grad()
    def keep(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Keep of received tensors what their layers will be compared with: 8 numbers and a length of each row."""
        started = time.perf_counter()
        for name, tensor in named:
            self._keep(name, tensor)
        self._seconds += time.perf_counter() - started

    def _keep(self, name: str, tensor: Tensor) -> None:
        for piece in self._places[name]:
            if piece.parameter in self._readers:
                part = piece.of(tensor).to(self._readers[piece.parameter].dtype)
                question = self._question(part.shape[1], part.dtype, part.device)
                values = Values(
                    columns=part[:, question.columns].T.contiguous(),
                    signs=F.linear(question.x[-1:], part)[0],
                    norms=torch.linalg.vector_norm(part, dim=1, dtype=torch.float32),
                    width=part.shape[1],
                )
                self._expected.setdefault(piece.parameter, []).append(Expected(name, piece.first_row, values))

    @torch.no_grad()
    def report(self) -> ReadbackReport:
        """Read the chosen layers, once the update is complete, and say which of them hold something else."""
        started = time.perf_counter()
        wrong: dict[str, str] = {}
        for path, parts in self._expected.items():
            for held, before in zip(self._held(path), self._before[path], strict=True):
                for part in parts:
                    said = self._compare(part, held, before)
                    if said is not None:
                        wrong.setdefault(part.name, said)
        return {
            "layers": len({path.rpartition(".")[0] for path in self._expected}),
            "unread": [
                name
                for name, pieces in self._places.items()
                if not pieces or any(piece.parameter not in self._readable for piece in pieces)
            ],
            "wrong": [[name, said] for name, said in wrong.items()],
            "seconds": self._seconds + time.perf_counter() - started,
        }

    def _compare(self, part: Expected, held: Tensor, before: Tensor) -> str | None:
        rows = slice(part.first_row, part.first_row + len(part.values.signs))
        others = (other for parts in self._expected.values() for other in parts if other is not part)
        return verdict(
            held[:, rows],
            part.values,
            before=before[:, rows],
            others=(("" if other.name == part.name else other.name, other.values.columns) for other in others),
        )

    def _held(self, path: str) -> list[Tensor]:
        """What each way of reading the parameter gives, [rows of x, rows of the parameter], on the CPU."""
        reader = self._readers[path]
        question = self._question(reader.width, reader.dtype, reader.device)
        with exact_products():
            return [way(question.x).cpu() for way in reader.ways]

    def _question(self, width: int, dtype: torch.dtype, device: torch.device) -> Question:
        """The same for all weights of a width: weights that were swapped are known by their columns."""
        key = width, dtype, device
        if key not in self._questions:
            draw = torch.Generator().manual_seed((self._plan["seed"] * 2_654_435_761 + width) % 2**63)
            columns = torch.randperm(width, generator=draw)[:COLUMNS]
            signs = torch.randint(0, 2, (1, width), generator=draw) * 2 - 1
            x = torch.cat([F.one_hot(columns, width), signs])
            self._questions[key] = Question(columns.to(device), x.to(device, dtype))
        return self._questions[key]


class Reader(NamedTuple):
    """How a parameter is read."""

    width: int
    """Columns of the parameter as a matrix: its shape behind the first axis, multiplied."""
    dtype: torch.dtype
    device: torch.device
    ways: list[Callable[[Tensor], Tensor]]
    """Each multiplies x, [rows of x, width], with the parameter as one user of it holds it."""


def readers(model: nn.Module, tied_heads: Iterable[ParallelLMHead]) -> dict[str, Reader]:
    """How to read each parameter of vLLM's model, by its path, but for those that are held in a form of their own.

    Those are weights of quantised layers and of fused experts. vlmrl syncs neither.
    """
    heads: dict[int, list[nn.Module]] = {}
    for head in tied_heads:
        heads.setdefault(id(head.weight), []).append(head)
    found: dict[str, Reader] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            ways: list[Callable[[Tensor], Tensor]] = []
            width = math.prod(parameter.shape[1:])
            if isinstance(module, LinearBase) and name == "weight":
                width = int(getattr(module, "input_size_per_partition", module.input_size))
                if type(module.quant_method) is UnquantizedLinearMethod and parameter.dim() < 3:
                    ways = [_applied(module)]
            elif not _is_transformed(module) and parameter.dim():
                ways = [_direct(module, name)]
                if isinstance(module, VocabParallelEmbedding) and name == "weight":
                    users = [module] if isinstance(module, ParallelLMHead) else []
                    ways += [_applied(user) for user in (*users, *heads.get(id(parameter), ()))]
            if ways and width:
                found[f"{path}.{name}" if path else name] = Reader(width, parameter.dtype, parameter.device, ways)
    return found


def _is_transformed(module: nn.Module) -> bool:
    """Whether vLLM holds the module's parameters in another form than they were loaded in."""
    method = getattr(module, "quant_method", None)
    return not (method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))


def _applied(layer: Any) -> Callable[[Tensor], Tensor]:
    """The product of the layer as it is held; the bias is a parameter of its own."""
    return lambda x: layer.quant_method.apply(layer, x, None)


def _direct(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    def read(x: Tensor) -> Tensor:
        parameter = getattr(module, name)
        matrix: Tensor = parameter.reshape(len(parameter), -1)
        return F.linear(x.to(matrix.dtype), matrix)

    return read


def chosen(readers: Mapping[str, Reader], plan: ReadbackPlan) -> dict[str, Reader]:
    """Those that this sync reads: all, or the parameters of one layer in `SHARE`, by the seed."""
    if plan["is_full"]:
        return dict(readers)
    layers = {path.rpartition(".")[0] for path in readers}
    drawn = sorted(layers, key=lambda layer: xxhash.xxh3_64_intdigest(f"{plan['seed']}|{layer}".encode()))
    taken = set(drawn[: -(-len(layers) // SHARE)])
    return {path: reader for path, reader in readers.items() if path.rpartition(".")[0] in taken}


@contextmanager
def exact_products() -> Iterator[None]:
    """Within the context, products in fp32 are not rounded to TF32 (VLLM_FLOAT32_MATMUL_PRECISION may ask for it)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
