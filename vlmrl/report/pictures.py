"""The images of a run, scaled for the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

_MAX_PIXELS = 2**27
"""A run saves no larger images."""
_MISSING = ""


@dataclass(slots=True)
class Pictures:
    """Images by hash as data URLs. Each is read and scaled once."""

    folder: Path
    """`rollouts/media/` of the run."""
    max_side: int
    """Longest side in pixels; smaller images stay as they are."""
    urls: dict[str, str] = field(default_factory=dict)
    """Those that were asked for; empty for one that cannot be read."""

    def url(self, name: str) -> str:
        """Return the image as a data URL; "" if there is none that can be read."""
        if name not in self.urls:
            self.urls[name] = self._encode(name)
        return self.urls[name]

    def _encode(self, name: str) -> str:
        # A transcript is a file that anybody may have made: its images are names in the folder, not paths.
        if not name.isalnum():
            return _MISSING
        try:
            with Image.open(self.folder / f"{name}.png", formats=["PNG"]) as image:
                if image.width * image.height > _MAX_PIXELS:
                    return _MISSING
                image.thumbnail((self.max_side, self.max_side), Image.Resampling.LANCZOS)
                out = io.BytesIO()
                # Drawings of a few colours stay sharp and are small without loss.
                is_small = image.width * image.height <= 160 * 160
                image.convert("RGB").save(out, "WEBP", lossless=is_small, quality=80, method=2)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow's errors for a damaged file
            return _MISSING
        return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode("ascii")
