"""The cache of image features in the training pass."""

from vlmrl.config.actor import Model
from vlmrl.config.base import NonNegativeFloat, Section, Unread


class Vision(Section):
    """The cache of image features in the training pass."""

    cache_gib: NonNegativeFloat = 2.0
    """CPU memory per rank, in GiB, for the image features of a frozen vision tower, which then processes each image
    once per run; 0 turns the cache off. Not used when tower or projector is trained."""


def unread_of_vision(model: Model, *, is_adapted: bool | None, has_other_frozen_tower: bool) -> Unread:
    """`is_adapted`: adapters change the tower or projector; None without adapters."""
    if has_other_frozen_tower or is_adapted is False:
        return {}
    if is_adapted:
        return {"vision.cache_gib": "ds.lora.target_modules include the tower or projector, so image features change"}
    if model.freeze_visual_encoder and model.freeze_projector:
        return {}
    reason = "actor.freeze_visual_encoder and actor.freeze_projector are not both on, so image features change"
    return {"vision.cache_gib": reason}
