"""vLLM workers with planted faults in adapter updates. vLLM imports them by name, in its own process."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vlmrl.rollout.adapter_loader import AdapterUpdate
from vlmrl.rollout.worker_extension import WeightReceiver


class Ignores(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        super().activate(tensors)
        self.manager.deactivate_adapter(1)


class Keeps(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        """Do nothing."""


class Forgets(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        super().activate(tensors)
        for layer in self.manager.modules.values():
            layer.reset_lora(0)


class TakesOtherNames(AdapterUpdate):
    _mapper = None


class SwapsLayers(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        other = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
        swapped = {}
        for name, tensor in tensors.items():
            source = next(part for part in other if part in name)
            swapped[name.replace(source, other[source])] = tensor
        super().activate(swapped)


class LosesOne(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        super().activate(
            {name: tensor for name, tensor in tensors.items() if "layers.1.self_attn.k_proj.lora_A" not in name}
        )


class LosesOneOnTheWay(AdapterUpdate):
    def load(self, tensors: Any, **options: Any) -> None:
        super().load(((n, t) for n, t in tensors if "layers.1.mlp.down_proj.lora_B" not in n), **options)


class AppliesTwice(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        super().activate({name: tensor * 2 if "lora_B" in name else tensor for name, tensor in tensors.items()})


class ScalesWrongly(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        self.description = {**self.description, "is_rank_stabilized": not self.description["is_rank_stabilized"]}
        super().activate(tensors)


class ChangesOneNumber(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if "layers.0.self_attn.v_proj.lora_B" in name)
        changed = tensors[name].clone()
        changed[0, 0] += 1e-6
        super().activate(tensors | {name: changed})


class ChangesKeysOfLinearAttention(AdapterUpdate):
    def activate(self, tensors: dict[str, Tensor]) -> None:
        super().activate(tensors)
        layer = next(layer for name, layer in self.manager.modules.items() if name.endswith("in_proj_qkvz"))
        layer.lora_b_stacked[1][0, 0, 0, 0] += 1e-2


class Faulty(WeightReceiver):
    def vlmrl_plant(self, fault: str) -> None:
        self.vlmrl_adapter_update = globals()[fault]
