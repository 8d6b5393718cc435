"""Low-rank adapters."""

from typing import Annotated

from pydantic import Field

from vlmrl.config.base import PositiveFloat, Section, Text

MAX_RANK = 512
"""The highest rank that vLLM serves."""
ADAPTER_RATE = 1e-5
"""Default peak learning rate of adapters."""


class Lora(Section):
    """Low-rank adapters (arXiv:2106.09685): the base is frozen, and small matrices added to it are trained."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the full model."""
    alpha: PositiveFloat = 16.0
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability on the adapters' inputs, in updates only; not with a reference of preferences (`dpo`)."""
    target_modules: Annotated[tuple[Text, ...], Field(min_length=1)] = ("all-linear",)
    """Layers that get an adapter. `all-linear`: those of the language model; `vision`: those of tower and projector;
    `all`: all that are not frozen; or names of the language model's layers, such as `q_proj v_proj`."""
    use_rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) (arXiv:2312.03732)."""
    use_dora: bool = False
    """Train magnitude and direction separately (arXiv:2402.09353). Engines get merged weights: vLLM has no DoRA."""
