"""Images in the training pass."""

from vlmrl.config.actor import Model
from vlmrl.config.base import NonNegativeFloat, Section, Unread


class Vision(Section):
    """Images in the training pass."""

    cache_gib: NonNegativeFloat = 2.0
    """GiB of CPU memory per rank for what a frozen vision tower made of images, so that each goes through it once in a
    run; 0 keeps nothing. Off by itself when tower or projector trains."""


def unread_of_vision(model: Model, *, reached_by_adapters: bool | None, has_frozen_tower_beside: bool) -> Unread:
    """`reached_by_adapters` is None where there are none, and the model itself trains."""
    if has_frozen_tower_beside or reached_by_adapters is False:
        return {}
    if reached_by_adapters:
        return {"vision.cache_gib": "ds.lora.target_modules reach the tower, so what it makes changes"}
    if model.freeze_visual_encoder and model.freeze_projector:
        return {}
    reason = "actor.freeze_visual_encoder and actor.freeze_projector are not both on, so what the tower makes changes"
    return {"vision.cache_gib": reason}
