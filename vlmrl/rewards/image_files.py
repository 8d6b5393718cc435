"""Images of responses as files, which scoring processes read.

An image is one .npy file, not one copy per response: traffic between processes does not grow with G.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vlmrl.types import Media

if TYPE_CHECKING:
    from PIL.Image import Image


def write_images(images: Iterable[Media], folder: Path) -> dict[str, str]:
    """Save images, and return their files by the hash of the image."""
    files = {}
    for media in images:
        file = folder / f"{media.hash}.npy"
        np.save(file, media.fetch(), allow_pickle=False)
        files[media.hash] = os.fspath(file)
    return files


def open_image(file: str) -> Image | list[Image]:
    """Return an image of `write_images`, or the frames of a video; each call returns new ones."""
    from PIL import Image

    pixels = np.load(file, allow_pickle=False)
    return Image.fromarray(pixels) if pixels.ndim == 3 else [Image.fromarray(frame) for frame in pixels]
