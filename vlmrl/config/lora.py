"""Low-rank adapters."""

from typing import Annotated

from pydantic import Field

from vlmrl.config.base import PositiveFloat, Section, Text

LARGEST_RANK = 512
"""What vLLM serves at most."""
ADAPTER_RATE = 1e-5
"""Peak learning rate of adapters, where none is given."""


class Lora(Section):
    """Low-rank adapters (arXiv:2106.09685): the base stays as it is, and small matrices beside it train."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the model itself."""
    alpha: PositiveFloat = 16.0
    """An adapter counts alpha / rank times."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of an adapter's inputs that an update drops."""
    target_modules: Annotated[tuple[Text, ...], Field(min_length=1)] = ("all-linear",)
    """Layers that get an adapter. `all-linear`: those of the language model; `vision`: those of tower and projector;
    `all`: every one that is not frozen; or names such as `q_proj v_proj`, which mean the language model's."""
    use_rslora: bool = False
    """An adapter counts alpha / sqrt(rank) times (arXiv:2312.03732)."""
    use_dora: bool = False
    """Train a magnitude beside the direction (arXiv:2402.09353). The engines get merged weights: vLLM has no DoRA."""
