"""Learning from preferences: the loss and its reference."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vlmrl.config.base import NonNegativeFloat, PositiveFloat, Section, Unread
from vlmrl.config.lora import Lora
from vlmrl.config.names import is_given

Loss = Literal["dpo", "ipo", "kto", "orpo", "simpo", "bco", "mpo"]

_NLL_OF_MPO = 1.0
_BETA_OF_SIMPO = 2.0
"""The paper (arXiv:2405.14734) has 2 to 2.5. With 0.1 the default margin would be 5 nats per token."""


class Dpo(Section):
    """The loss of preferences."""

    loss: Loss = "dpo"
    """`dpo`, `ipo`, `bco` and `mpo` (DPO + BCO + NLL) learn from pairs with a reference, `orpo` and `simpo` without
    one. `kto` learns from single responses (`data.output_key`) that are desirable or not (`data.label_key`: true or
    false)."""
    beta: PositiveFloat = 0.1
    """Strength of the reference: a larger one keeps the policy closer to it. For `orpo` the weight of the odds ratio;
    for `simpo` the scale of the mean log-probs, by default 2."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a label is wrong (cDPO)."""
    nll_loss_coef: NonNegativeFloat | None = None
    """Weight of the mean negative log-likelihood per token of the chosen responses; by default 1 for `mpo`, else 0."""
    simpo_gamma: NonNegativeFloat = 0.5
    """Margin by which the reward of a chosen response should be larger (SimPO)."""
    mpo_weights: tuple[NonNegativeFloat, NonNegativeFloat] = (0.8, 0.2)
    """Weights of DPO and BCO in MPO; that of the NLL is `dpo.nll_loss_coef`."""
    kto_desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable responses."""
    kto_undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable responses."""
    precompute_reference: bool = False
    """Compute the log-probs of the reference once, before training, with the model that is trained later, and keep them
    in the run's folder: no reference is in memory while the model trains."""

    @field_validator("loss", mode="before")
    @classmethod
    def _refuse_variants(cls, loss: Any) -> Any:
        if loss == "cdpo":
            raise ValueError("cDPO is dpo with a share of wrong labels: give --dpo.label_smoothing 0.1, for instance")
        return loss

    @property
    def needs_reference(self) -> bool:
        """The loss compares the policy with a reference."""
        return self.loss not in ("orpo", "simpo")

    @property
    def is_paired(self) -> bool:
        """Rows have a chosen and a rejected response."""
        return self.loss != "kto"

    @property
    def nll_coef(self) -> float:
        """`nll_loss_coef` with its default."""
        if self.nll_loss_coef is not None:
            return self.nll_loss_coef
        return _NLL_OF_MPO if self.loss == "mpo" else 0.0


def with_beta_of_loss(dpo: Dpo) -> Dpo:
    """Set the default of `beta`, which depends on the loss."""
    if dpo.loss != "simpo" or is_given(dpo, "beta"):
        return dpo
    return dpo.model_copy(update={"beta": _BETA_OF_SIMPO})


_READ_BY = {
    "dpo.label_smoothing": ("dpo", "mpo"),
    "dpo.nll_loss_coef": ("dpo", "ipo", "bco", "simpo", "mpo"),
    "dpo.simpo_gamma": ("simpo",),
    "dpo.mpo_weights": ("mpo",),
    "dpo.kto_desirable_weight": ("kto",),
    "dpo.kto_undesirable_weight": ("kto",),
    "dpo.precompute_reference": ("dpo", "ipo", "kto", "bco", "mpo"),
    "data.chosen_key": ("dpo", "ipo", "orpo", "simpo", "bco", "mpo"),
    "data.rejected_key": ("dpo", "ipo", "orpo", "simpo", "bco", "mpo"),
    "data.output_key": ("kto",),
    "data.label_key": ("kto",),
}
"""Setting -> the losses that read it."""


def unread_of_dpo(dpo: Dpo) -> Unread:
    return {
        name: f"dpo.loss {dpo.loss} does not have it; {', '.join(losses)} {'has' if len(losses) == 1 else 'have'}"
        for name, losses in _READ_BY.items()
        if dpo.loss not in losses
    }


def unread_of_ref(dpo: Dpo, *, has_reference: bool, is_base: bool) -> Unread:
    """`has_reference`: the reference is a model of its own; `is_base`: it is the actor with its adapters off."""
    if has_reference:
        return {}
    names = ("ref.num_nodes", "ref.num_gpus_per_node")
    if not dpo.needs_reference:
        return dict.fromkeys((*names, "ref.model_name_or_path"), f"dpo.loss {dpo.loss} has no reference")
    if dpo.precompute_reference:
        return dict.fromkeys(names, "dpo.precompute_reference computes the reference with the actor's ranks")
    assert is_base, "a loss with a reference has one of the three kinds"
    return dict.fromkeys(names, "the reference is the actor with its adapters off (ds.lora.rank)")


def conflicts_of_adapter(*, adapter: str | None, is_base: bool) -> list[str]:
    """`adapter`: `actor.adapter_name_or_path`; `is_base`: the reference is the actor with its adapters off."""
    if adapter is None or not is_base:
        return []
    conflict = (
        f"the reference is the actor before training, and with its adapters off it would lack {adapter} "
        "(actor.adapter_name_or_path): set dpo.precompute_reference, or merge the adapter first (vlmrl merge)"
    )
    return [conflict]


def conflicts_of_ref(dpo: Dpo, *, model: str | None) -> list[str]:
    """`model`: `ref.model_name_or_path`."""
    if not dpo.precompute_reference or model is None or not dpo.needs_reference:
        return []
    conflict = (
        "dpo.precompute_reference computes the reference with the actor's initial weights, and ref.model_name_or_path "
        f"names another model, {model}: leave one of them out"
    )
    return [conflict]


def conflicts_of_batch(dpo: Dpo, *, batch_size: int) -> list[str]:
    if dpo.is_paired or batch_size > 1:
        return []
    return ["dpo.loss kto compares the responses of a step with other prompts: set train.batch_size above 1"]


def conflicts_of_dropout(dpo: Dpo, lora: Lora) -> list[str]:
    if not dpo.needs_reference or lora.rank == 0 or lora.dropout == 0:
        return []
    conflict = (
        f"ds.lora.dropout {lora.dropout:g} makes each log-ratio to the reference noisy, from which dpo.loss {dpo.loss} "
        "learns: set it to 0"
    )
    return [conflict]
