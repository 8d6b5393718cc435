"""Settings of a rollout engine. They import neither torch nor vLLM until `build` runs in the engine's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.rollout.capacity import Demand

if TYPE_CHECKING:
    from vlmrl.models.adapter_plan import AdapterPlan
    from vlmrl.rollout.engine import RolloutEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of `RolloutEngine`."""

    model: str
    """Folder or Hub id."""
    vllm: Vllm
    columns: Columns
    trust_remote_code: bool
    dtype: str
    """`bf16` or `fp32`."""
    max_model_len: int
    """Tokens of prompt and response together."""
    top_p: float
    name: str
    """For messages."""
    max_images: int | None = None
    """Images of prompt and response together; None: `data.max_images_per_prompt`."""
    adapter: AdapterPlan | None = None
    """The adapter to make room for, one that `fits_engine`."""
    temperature: float | None = None
    """Temperature of the log-probs that `score` returns; None: those of the model itself."""
    returns_experts: bool = False
    """Responses hold the experts that were chosen for their tokens."""
    demand: Demand | None = None
    """The demand that the engine's limits must fit."""

    def build(self) -> RolloutEngine:
        from vlmrl.rollout.engine import RolloutEngine

        return RolloutEngine(self)
