"""Images in the training pass."""

from vlmrl.config.base import NonNegativeFloat, Section


class Vision(Section):
    """Images in the training pass."""

    cache_gib: NonNegativeFloat = 2.0
    """GiB of CPU memory per rank for what a frozen vision tower made of images, so that each goes through it once in a
    run; 0 keeps nothing. Off by itself when tower or projector trains."""
