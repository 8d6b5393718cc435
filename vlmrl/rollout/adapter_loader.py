"""An adapter on its way into vLLM's layers, as tensors and without a file, and the proof that they hold it.

vLLM takes adapters from folders, skips what it has no layer for, and puts zeros where nothing came. Here the tensors
come from memory, go in the way that those of a folder would, and are then read back from the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from vlmrl.models.weights import digest
from vlmrl.rollout.reports import AdapterReport, Announcement
from vlmrl.rollout.requests import ADAPTER_ID

if TYPE_CHECKING:
    from vllm.lora.worker_manager import WorkerLoRAManager

_ROUNDING = 1e-2
"""Relative; a B that is a multiple of what was sent, up to bf16's rounding, was scaled and not changed."""


class AdapterUpdate:
    """One update of the one adapter of an engine. Until `complete` the layers hold the adapter from before."""

    def __init__(self, lora: WorkerLoRAManager, announced: Announcement) -> None:
        """`lora` is vLLM's, in a worker that was started with `enable_lora` and one place for an adapter."""
        self.manager: Any = lora._adapter_manager
        self.announced = announced
        self.digests: dict[str, str] = {}
        self._config = lora.lora_config
        self._tensors: dict[str, Tensor] = {}
        self._before = {place: digest(place, held) for place, held in self._held()}

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str] = digest) -> None:
        """Keep copies of the tensors, named as in PEFT's files."""
        for name, tensor in tensors:
            self._tensors[name] = tensor.clone()
            self.digests[name] = digest_of(name, self._tensors[name])

    @torch.no_grad()
    def complete(self) -> AdapterReport:
        """Put the adapter into the layers, if all of it came and has a place, and say what they hold."""
        place_of = {name: self._place(name) for name in self.digests}
        places = self._before.keys()
        announced = set(self.announced["names"])
        report: AdapterReport = {
            "digests": self.digests,
            "unknown": sorted(self.digests.keys() - announced),
            "ignored": sorted(name for name, place in place_of.items() if place not in places),
            "missing": sorted(announced - self.digests.keys()),
            "is_active": False,
            "factor": 1.0,
            "empty": [],
            "older": [],
            "other": [],
        }
        if not (report["unknown"] or report["ignored"] or report["missing"]):
            self.put(dict(self._tensors))
            self._read(report, {place: name for name, place in place_of.items()})
        return report

    def close(self) -> None:
        """Give the update up; the layers still hold the adapter from before."""

    def put(self, tensors: dict[str, Tensor]) -> None:
        """What vLLM does with an adapter from a folder, from where it has been read on."""
        helper = PEFTHelper(
            r=self.announced["rank"],
            lora_alpha=self.announced["alpha"],  # an int, says vLLM, which only divides it
            target_modules=sorted({name.rsplit(".", 3)[1] for name in tensors}),
            use_rslora=self.announced["is_rank_stabilized"],
        )
        helper.validate_legal(self._config)
        dtype = self._dtype
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            # Copies, because vLLM multiplies B by the scaling where it lies.
            {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()},
            helper,
            device="cpu",
            dtype=dtype,
            weights_mapper=self._mapper,
        )
        self.manager.remove_adapter(ADAPTER_ID)
        self.manager.add_adapter(adapter)
        self.manager.activate_adapter(ADAPTER_ID)

    # ---- where a tensor belongs

    @property
    def _dtype(self) -> torch.dtype:
        dtype = self._config.lora_dtype
        assert isinstance(dtype, torch.dtype)  # "auto" has been resolved when the engine started
        return dtype

    @property
    def _mapper(self) -> Any:
        """From the trainer's names to vLLM's, or None where they are the same."""
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def _place(self, name: str) -> str:
        """Where vLLM should have the tensor of this name: `<layer as the checkpoint knows it>.lora_A`."""
        layer, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        return f"{layer}.lora_A" if is_a else f"{layer}.lora_B"

    def _layers(self) -> Iterator[tuple[str, Any, list[str]]]:
        """Every layer that vLLM has prepared, by its name, with the names of the layers that vLLM packed into it."""
        for name, layer in self.manager.modules.items():
            parts = self.manager.packed_modules.get(name, [name])
            if len(parts) != len(layer.lora_a_stacked):
                raise ValueError(f"vLLM's {name} packs {len(layer.lora_a_stacked)} matrices and names {len(parts)}")
            yield name, layer, parts

    # ---- proof

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Every matrix that the layers hold, by its place: A [R, in] and B [out, R], zero beyond the adapter's rank."""
        for _, layer, parts in self._layers():
            for half, matrices in (("lora_A", layer.lora_a_stacked), ("lora_B", layer.lora_b_stacked)):
                for part, matrix in zip(parts, matrices, strict=True):
                    yield f"{part}.{half}", matrix[0, 0].cpu()

    def _wanted(self, name_at: dict[str, str]) -> dict[str, Tensor]:
        """What each place must hold: A, and B times the scaling, cut to this worker's share."""
        scaled = {
            place: self._tensors[name].cpu().to(self._dtype) * (self.announced["scaling"] if "lora_B" in place else 1)
            for place, name in name_at.items()
        }
        wanted: dict[str, Tensor | None] = {}
        for name, layer, parts in self._layers():
            for half, cut in (("lora_A", layer.slice_lora_a), ("lora_B", layer.slice_lora_b)):
                whole = [scaled.get(f"{part}.{half}") for part in parts]
                if layer.tp_size > 1 and any(matrix is not None for matrix in whole):
                    whole = cut(whole) if name in self.manager.packed_modules else [cut(whole[0])]
                wanted |= {f"{part}.{half}": matrix for part, matrix in zip(parts, whole, strict=True)}
        return {place: matrix for place, matrix in wanted.items() if matrix is not None}

    def _read(self, report: AdapterReport, name_at: dict[str, str]) -> None:
        """Compare the layers with what was sent, bit for bit, and enter into the report what is not so."""
        report["is_active"] = self.manager.lora_index_to_id == [ADAPTER_ID]
        wanted = self._wanted(name_at)
        odd: dict[str, tuple[Tensor, Tensor]] = {}
        for place, held in self._held():
            whole = torch.zeros_like(held)
            if place in wanted:
                rows, columns = wanted[place].shape
                whole[:rows, :columns] = wanted[place]
            if digest(place, held) != digest(place, whole):
                odd[place] = held, whole
        scaled = {place for place, matrix in wanted.items() if place.endswith("lora_B") and matrix.any()}
        factor = common_factor(odd.values()) if odd and odd.keys() == scaled else None
        if factor is not None:
            report["factor"] = factor
            return
        for place, (held, _) in odd.items():
            if not held.any():
                kind = report["empty"]
            elif digest(place, held) == self._before[place]:
                kind = report["older"]
            else:
                kind = report["other"]
            kind.append(name_at.get(place, place))


def common_factor(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """The number that makes the first of each pair out of the second; None when there is none but 0, 1 or about 1."""
    held, wanted = zip(*pairs, strict=True)
    ones, others = (torch.cat([matrix.reshape(-1).double() for matrix in side]) for side in (held, wanted))
    factor = float(ones @ others / (others @ others))
    is_fit = bool((ones - factor * others).norm() <= _ROUNDING * ones.norm())
    return factor if is_fit and factor != 0 and abs(factor - 1) > _ROUNDING else None
