"""Checks of the settings of mixtures of experts, before any weight is read."""

from __future__ import annotations

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.names import is_given
from vlmrl.errors import ConfigError

NO_EXPERTS = "{} is for mixtures of experts, and the model has none: leave it out"


def check_experts(actor: Model, ds: Ds, *, replays: bool = False) -> None:
    """Check the settings of experts, and those that experts rule out, against the actor's configuration.

    Raises:
        ConfigError: the actor has no experts, or has some and a setting does not support them.
    """
    named = ["actor.aux_loss_coef"] * bool(actor.aux_loss_coef)
    named += ["ds.experts_implementation"] * is_given(ds, "experts_implementation")
    named += ["algo.routing_replay"] * replays
    named += ["ds.expert_parallel_size"] * (ds.expert_parallel_size > 1)
    if not named and not ds.load_in_4bit:
        return
    from vlmrl.models.expert_parallel import check_expert_parallel
    from vlmrl.models.experts import routers
    from vlmrl.models.load import skeleton

    net = skeleton(actor.model_name_or_path, trust_remote_code=actor.trust_remote_code)
    has_experts = bool(routers(net))
    if named and not has_experts:
        raise ConfigError(NO_EXPERTS.format(named[0]))
    if ds.load_in_4bit and has_experts:
        raise ConfigError(
            "ds.load_in_4bit: bitsandbytes has 4 bits for linear layers only, and this model's experts, nearly all of "
            "its weights, are none: train adapters without it"
        )
    check_expert_parallel(net, ds.expert_parallel_size)
