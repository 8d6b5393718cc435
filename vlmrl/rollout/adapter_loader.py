"""Load an adapter into vLLM's layers from tensors, without a file, and verify that the layers hold it.

vLLM loads adapters from folders, skips tensors that it has no layer for, and fills missing ones with zeros. Here the
tensors come from memory, take the same path as those of a folder, and are then read back from the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from vlmrl.models.weight_buckets import digest
from vlmrl.rollout.reports import AdapterDescription, AdapterReport
from vlmrl.rollout.requests import ADAPTER_ID

if TYPE_CHECKING:
    from vllm.lora.worker_manager import WorkerLoRAManager

_ROUNDING = 1e-2
"""Relative tolerance: a B that is a multiple of the one sent, within bf16's rounding, counts as scaled."""


class AdapterUpdate:
    """One update of the one adapter of an engine. Until `complete` the layers hold the previous adapter."""

    def __init__(self, lora: WorkerLoRAManager, description: AdapterDescription) -> None:
        """`lora` is vLLM's manager, in a worker that was started with `enable_lora` and `max_loras` 1."""
        self.manager: Any = lora._adapter_manager
        self.description = description
        self.digests: dict[str, str] = {}
        self._config = lora.lora_config
        self._tensors: dict[str, Tensor] = {}
        self._before = {place: digest(place, held) for place, held in self._held()}

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str] = digest) -> None:
        """Copy the tensors, which are named as in PEFT's files."""
        for name, tensor in tensors:
            self._tensors[name] = tensor.clone()
            self.digests[name] = digest_of(name, self._tensors[name])

    @torch.no_grad()
    def complete(self) -> AdapterReport:
        """Activate the adapter if all its tensors have arrived and have a place, and report what the layers hold."""
        place_of = {name: self._place(name) for name in self.digests}
        places = self._before.keys()
        described = set(self.description["names"])
        report: AdapterReport = {
            "digests": self.digests,
            "unknown": sorted(self.digests.keys() - described),
            "ignored": sorted(name for name, place in place_of.items() if place not in places),
            "missing": sorted(described - self.digests.keys()),
            "is_active": False,
            "factor": 1.0,
            "empty": [],
            "older": [],
            "other": [],
        }
        if not (report["unknown"] or report["ignored"] or report["missing"]):
            self.activate(dict(self._tensors))
            self._read(report, {place: name for name, place in place_of.items()})
        return report

    def close(self) -> None:
        """Abandon the update; the layers still hold the previous adapter."""

    def activate(self, tensors: dict[str, Tensor]) -> None:
        """Do what vLLM does with an adapter from a folder once it has been read."""
        helper = PEFTHelper(
            r=self.description["rank"],
            lora_alpha=self.description["alpha"],  # vLLM's annotation says int, but it only divides it
            target_modules=sorted({name.rsplit(".", 3)[1] for name in tensors}),
            use_rslora=self.description["is_rank_stabilized"],
        )
        helper.validate_legal(self._config)
        dtype = self._dtype
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            # Copies, because vLLM multiplies B by the scaling in place.
            {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()},
            helper,
            device="cpu",
            dtype=dtype,
            weights_mapper=self._mapper,
        )
        self.manager.remove_adapter(ADAPTER_ID)
        self.manager.add_adapter(adapter)
        self.manager.activate_adapter(ADAPTER_ID)

    # ---- places of tensors

    @property
    def _dtype(self) -> torch.dtype:
        dtype = self._config.lora_dtype
        assert isinstance(dtype, torch.dtype)  # "auto" was resolved when the engine started
        return dtype

    @property
    def _mapper(self) -> Any:
        """Mapper from the trainer's names to vLLM's; None where they are the same."""
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def _place(self, name: str) -> str:
        """Return the place of a tensor in vLLM: `<name of the layer in the checkpoint>.lora_A` or `.lora_B`."""
        layer, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        return f"{layer}.lora_A" if is_a else f"{layer}.lora_B"

    def _layers(self) -> Iterator[tuple[str, Any, list[str]]]:
        """Return all layers that vLLM has prepared: name, layer, and the parts that its matrices belong to.

        A part is the name of a layer in the checkpoint. The first part of a layer may have several matrices, which are
        then `part`, `part#1`, ...: they have the same A and shares of B.
        """
        for name, layer in self.manager.modules.items():
            parts = list(self.manager.packed_modules.get(name, [name]))
            num_more = len(layer.lora_a_stacked) - len(parts)
            if num_more < 0 or (num_more and not hasattr(layer, "expand_packed_lora")):
                raise ValueError(f"vLLM's {name} packs {len(layer.lora_a_stacked)} matrices but names {len(parts)}")
            yield name, layer, [parts[0], *(f"{parts[0]}#{i + 1}" for i in range(num_more)), *parts[1:]]

    # ---- verification

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Place and value of each matrix in the layers: A [R, in] and B [out, R], zero beyond the adapter's rank."""
        for _, layer, parts in self._layers():
            for half, matrices in (("lora_A", layer.lora_a_stacked), ("lora_B", layer.lora_b_stacked)):
                for part, matrix in zip(parts, matrices, strict=True):
                    yield _place_of(part, half), matrix[0, 0].cpu()

    def _expected(self, name_at: dict[str, str]) -> dict[str, Tensor]:
        """Return the expected value of each place: A, and B times the scaling, sliced to this worker's shard."""
        scaled = {
            place: self._tensors[name].cpu().to(self._dtype) * (self.description["scaling"] if "lora_B" in place else 1)
            for place, name in name_at.items()
        }
        expected: dict[str, Tensor | None] = {}
        for name, layer, parts in self._layers():
            for half, take_shard in (("lora_A", layer.slice_lora_a), ("lora_B", layer.slice_lora_b)):
                whole = [scaled.get(f"{part.partition('#')[0]}.{half}") for part in parts]
                if half == "lora_B":
                    whole = _shares(whole, parts, layer)
                if layer.tp_size > 1 and any(matrix is not None for matrix in whole):
                    whole = take_shard(whole) if name in self.manager.packed_modules else [take_shard(whole[0])]
                expected |= {_place_of(part, half): matrix for part, matrix in zip(parts, whole, strict=True)}
        return {place: matrix for place, matrix in expected.items() if matrix is not None}

    def _read(self, report: AdapterReport, name_at: dict[str, str]) -> None:
        """Compare the layers with what was sent, bit for bit, and add the differences to the report."""
        report["is_active"] = self.manager.lora_index_to_id == [ADAPTER_ID]
        expected = self._expected(name_at)
        different: dict[str, tuple[Tensor, Tensor]] = {}
        for place, held in self._held():
            padded = torch.zeros_like(held)
            if place in expected:
                rows, columns = expected[place].shape
                padded[:rows, :columns] = expected[place]
            if digest(place, held) != digest(place, padded):
                different[place] = held, padded
        scaled = {place for place, matrix in expected.items() if ".lora_B" in place and matrix.any()}
        factor = common_factor(different.values()) if different and different.keys() == scaled else None
        if factor is not None:
            report["factor"] = factor
            return
        for place, (held, _) in different.items():
            if not held.any():
                names = report["empty"]
            elif digest(place, held) == self._before[place]:
                names = report["older"]
            else:
                names = report["other"]
            names.append(name_at.get(place.partition("#")[0], place))


def _place_of(part: str, half: str) -> str:
    """Return the place of one matrix: `part#1` has `part.lora_A#1` and `part.lora_B#1`."""
    name, mark, number = part.partition("#")
    return f"{name}.{half}{mark}{number}"


def _shares(whole: list[Tensor | None], parts: list[str], layer: Any) -> list[Tensor | None]:
    """Split the B of parts with several matrices, which `whole` repeats, into the rows of each matrix."""
    if not any("#" in part for part in parts):
        return whole
    shares: list[Tensor | None] = []
    row = 0
    for part, matrix, size in zip(parts, whole, layer.output_sizes, strict=True):
        row = row if "#" in part else 0
        shares.append(None if matrix is None else matrix[row : row + size])
        row += size
    return shares


def common_factor(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Return the factor by which the first of each pair is a multiple of the second; None without one, and for 0 or
    about 1."""
    held, expected = zip(*pairs, strict=True)
    held_flat, expected_flat = (
        torch.cat([matrix.reshape(-1).double() for matrix in side]) for side in (held, expected)
    )
    factor = float(held_flat @ expected_flat / (expected_flat @ expected_flat))
    is_fit = bool((held_flat - factor * expected_flat).norm() <= _ROUNDING * held_flat.norm())
    return factor if is_fit and factor != 0 and abs(factor - 1) > _ROUNDING else None
