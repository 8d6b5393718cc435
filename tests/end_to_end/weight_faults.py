"""vLLM workers with planted faults in weight updates. vLLM imports them by name, in its process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vlmrl.rollout.reports import ReadbackPlan
from vlmrl.rollout.worker_extension import WeightReceiver, WeightUpdate


class Sound(WeightUpdate):
    """Stores received tensors for faults that need those of the previous update."""

    sent: dict[str, Tensor]
    old: dict[str, Tensor]

    def begun(self, old: dict[str, Tensor]) -> None:
        self.sent, self.old = {}, old

    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        # The digests are already computed here.
        self.sent |= {name: tensor.clone() for name, tensor in tensors}
        return super()._load_into_model([(name, self.changed(name, tensor)) for name, tensor in tensors])

    def changed(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


class Scales(Sound):
    def changed(self, name: str, tensor: Tensor) -> Tensor:
        return tensor * 1.01 if name.endswith("layers.1.mlp.down_proj.weight") else tensor


class KeepsTheTower(Sound):
    def changed(self, name: str, tensor: Tensor) -> Tensor:
        return self.old[name] if "visual" in name else tensor


class KeepsALayer(Sound):
    """vLLM packs the new weights, and keeps using the previously packed ones."""

    def begun(self, old: dict[str, Tensor]) -> None:
        super().begun(old)
        self.layer: Any = next(m for n, m in self.model.named_modules() if n.endswith("layers.0.self_attn.o_proj"))
        self.packed = self.layer.cpu_linear

    def close(self) -> None:
        super().close()
        self.layer.cpu_linear = self.packed


class SwapsKeysAndValues(Sound):
    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        layer = "layers.0.self_attn."
        other = {f"{layer}k_proj.weight": f"{layer}v_proj.weight", f"{layer}v_proj.weight": f"{layer}k_proj.weight"}
        named = []
        for name, tensor in tensors:
            source = next((part for part in other if name.endswith(part)), None)
            named.append((name.replace(source, other[source]) if source else name, tensor))
        return super()._load_into_model(named)


class SwapsQueriesAndKeysOfTheTower(Sound):
    def changed(self, name: str, tensor: Tensor) -> Tensor:
        if not name.endswith("blocks.0.attn.qkv.weight"):
            return tensor
        queries, keys, values = tensor.chunk(3)
        return torch.cat([keys, queries, values])


class LeavesTheHeadBehind(Sound):
    def close(self) -> None:
        self._tied_heads = []
        super().close()


class PacksExpertsOnce(Sound):
    """vLLM without `pack_experts_again`."""

    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        methods: list[Any] = [m.quant_method for m in self.model.modules() if hasattr(m, "quant_method")]
        patched = {m: m.process_weights_after_loading for m in methods if hasattr(m, "vlmrl_process")}
        for method in patched:
            method.process_weights_after_loading = method.vlmrl_process
        try:
            return super()._load_into_model(tensors)
        finally:
            for method, process in patched.items():
                method.process_weights_after_loading = process


class KeepsTheExperts(Sound):
    def begun(self, old: dict[str, Tensor]) -> None:
        super().begun(old)
        self.layer: Any = next(
            m for n, m in self.model.named_modules() if n.endswith("layers.0.mlp.experts.routed_experts")
        )
        tensors: Any = get_layerwise_info(self.layer).kernel_tensors
        self.packed = tensors[0]["w13_weight"].clone()

    def close(self) -> None:
        super().close()
        self.layer.w13_weight.data.copy_(self.packed)


class SwapsTwoExperts(Sound):
    def changed(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 3 and name.endswith("layers.1.mlp.experts.down_proj"):
            return tensor[[1, 0, *range(2, len(tensor))]]
        return tensor


class ScalesAnExpert(Sound):
    def changed(self, name: str, tensor: Tensor) -> Tensor:
        return tensor * 1.01 if name.endswith("layers.1.mlp.experts.2.up_proj.weight") else tensor


class KeepsAShard(KeepsALayer):
    """The fault occurs only in the second of two workers."""

    def close(self) -> None:
        packed, self.packed = self.packed, None
        WeightUpdate.close(self)
        if self.layer.tp_rank == 1:
            self.layer.cpu_linear = packed


class Faulty(WeightReceiver):
    vlmrl_fault: type[Sound] = Sound
    vlmrl_sent: dict[str, Tensor] | None = None

    def vlmrl_plant(self, fault: str) -> None:
        self.vlmrl_fault = globals()[fault]

    def vlmrl_begin(self, plan: ReadbackPlan | None = None) -> None:
        super().vlmrl_begin(plan)
        update: Any = self.vlmrl_update
        update.__class__ = self.vlmrl_fault
        update.begun(self.vlmrl_sent or {})
        self.vlmrl_sent = update.sent
