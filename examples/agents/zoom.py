"""Questions about a picture, with a tool that enlarges a part of it.

    vlmrl rl --train.agent_func_path examples/agents/zoom.py:make ...

The conversation begins with the row's own prompt. A response without a call is the last one, and the run's reward
functions score it. Coordinates are pixels of the picture as the model gets it, as Qwen2.5-VL was trained to give them.
"""

from PIL import Image

from vlmrl.agents import Reply, tool

SMALLEST = 28
"""Pixels of a side before it is enlarged."""
LONGER_SIDE = 560
"""Pixels after it is enlarged."""


class Zoom:
    """One question with one or more pictures."""

    def reset(self, row):
        self.pictures = row.get("images") if row else None
        if not self.pictures:
            raise ValueError("zoom.py needs rows with images")
        # nothing is returned: the conversation begins with the row's own prompt

    def step(self, response):
        return Reply(done=True)

    @tool
    def zoom(self, left: int, top: int, right: int, bottom: int, picture: int = 1) -> Image.Image:
        """Enlarge a part of a picture. Its sides are given in pixels."""
        if not 1 <= picture <= len(self.pictures):
            raise ValueError(f"there are {len(self.pictures)} pictures, counted from 1")
        image = self.pictures[picture - 1]
        left, right = max(left, 0), min(right, image.width)
        top, bottom = max(top, 0), min(bottom, image.height)
        if min(right - left, bottom - top) < SMALLEST:
            raise ValueError(f"a part has at least {SMALLEST} x {SMALLEST} pixels; the picture has {image.size}")
        scale = LONGER_SIDE / max(right - left, bottom - top)
        size = (round((right - left) * scale), round((bottom - top) * scale))
        return image.crop((left, top, right, bottom)).resize(size, Image.Resampling.BICUBIC)


def make():
    return Zoom()
