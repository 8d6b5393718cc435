"""Settings of a rollout engine, which build it where it is to run: until then neither torch nor vLLM is imported."""

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
    adapter: AdapterPlan | None = None
    """Room is made for it; one that `fits_engine`."""
    temperature: float | None = None
    """That of the distribution whose log-probs `score` returns; None: it returns the model's own."""
    demand: Demand | None = None
    """Room is made for it."""

    def build(self) -> RolloutEngine:
        from vlmrl.rollout.engine import RolloutEngine

        return RolloutEngine(self)
