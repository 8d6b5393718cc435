"""Sizes, processors and adapters of models, from their configurations only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmrl.models.adapter_plan import AdapterPlan, plan_adapter
from vlmrl.models.load import skeleton
from vlmrl.models.sizes import Sizes, model_sizes
from vlmrl.plugins import Processor, processor_of

if TYPE_CHECKING:
    from vlmrl.config.actor import Model
    from vlmrl.config.lora import Lora
    from vlmrl.config.training import TrainingConfig


class ConfiguredModels:
    """Reads configurations, each once."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[Sizes, Processor]] = {}
        self._adapters: dict[tuple[str, ...], AdapterPlan | None] = {}

    def read(self, path: str, config: TrainingConfig) -> tuple[Sizes, Processor]:
        """Return sizes and processor of the model in `path`. All calls must have the same image settings."""
        if path not in self._models:
            trust_remote_code = config.actor.trust_remote_code
            processor = processor_of(path, config.data, trust_remote_code=trust_remote_code)
            net = skeleton(path, trust_remote_code=trust_remote_code)
            self._models[path] = model_sizes(net, processor.parameter_group), processor
        return self._models[path]

    def adapter(self, model: Model, lora: Lora, processor: Processor) -> AdapterPlan | None:
        """Plan the adapter of a model; None when the model itself trains. See `plan_adapter`."""
        key = (repr(model), repr(lora))
        if key not in self._adapters:
            self._adapters[key] = plan_adapter(model, lora, processor)
        return self._adapters[key]
