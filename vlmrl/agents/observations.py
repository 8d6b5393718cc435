"""Check what the methods of an environment return, and convert it to text and pixels. Nothing of it is trusted."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vlmrl.agents.environment import Reply
from vlmrl.agents.messages import Answer, Picture
from vlmrl.data.decode import check_pixels, check_size, upright_rgb
from vlmrl.data.media import MAX_ASPECT_RATIO, ImageLimits
from vlmrl.errors import DataError
from vlmrl.rewards.bounds import problem_of_reward

MAX_PARTS = 256
MAX_CHARS = 1_000_000
"""Most texts and images of an observation, and most characters of its texts."""
_MAX_NAME_CHARS = 200
"""Most characters of the name of a number that `run` returned."""


class UnusableError(Exception):
    """An environment returned something else than it should."""


def of_reset(number: int, returned: Any, limits: ImageLimits) -> Answer:
    """Convert what `reset` returned; None has no parts. Raises UnusableError."""
    parts = [] if returned is None else _parts(returned, "reset", limits)
    return Answer(number, "observation", parts)


def of_step(number: int, returned: Any, limits: ImageLimits) -> Answer:
    """Convert the `Reply` that `step` returned. Raises UnusableError."""
    if not isinstance(returned, Reply):
        raise UnusableError(f"step returned {_describe(returned)} where a Reply is expected")
    return _of_reply(number, returned, "step", limits)


def of_tool(number: int, name: str, returned: Any, limits: ImageLimits) -> Answer:
    """Convert what a tool returned: a `Reply`, text, images, or any other JSON value. Raises UnusableError."""
    if isinstance(returned, Reply):
        return _of_reply(number, returned, name, limits)
    if not _is_content(returned):
        if hasattr(returned, "item") and getattr(returned, "ndim", None) == 0:
            returned = returned.item()
        try:
            returned = json.dumps(returned, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UnusableError(
                f"{name} returned {_describe(returned)} where text, images or JSON are expected: {error}"
            ) from error
    return Answer(number, "observation", _parts(returned, name, limits))


def of_run(number: int, returned: Any) -> Answer:
    """Convert the reward that `run` returned, and the other numbers of a dict. Raises UnusableError."""
    if not isinstance(returned, dict):
        return Answer(number, "observation", [], 0.0 if returned is None else _reward(returned, "run"), done=True)
    are_names = all(isinstance(name, str) and len(name) <= _MAX_NAME_CHARS for name in returned)
    if "total" not in returned or len(returned) > MAX_PARTS or not are_names:
        raise UnusableError("run returned a dict, which needs a number named total, and names that are short texts")
    numbers = {name: _reward(value, "run") for name, value in returned.items()}
    reward = numbers.pop("total")
    return Answer(number, "observation", [], reward, done=True, numbers=numbers)


def _of_reply(number: int, reply: Reply, method: str, limits: ImageLimits) -> Answer:
    done: Any = reply.done
    if isinstance(done, np.bool_):
        done = done.item()
    if not isinstance(done, bool):
        raise UnusableError(f"{method} returned {_describe(reply.done)} as done where True or False is expected")
    reward = _reward(reply.reward, method)
    if reply.content is None and done:
        return Answer(number, "observation", [], reward, done)
    return Answer(number, "observation", _parts(reply.content, method, limits), reward, done)


def _reward(value: Any, method: str) -> float:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise UnusableError(f"{method} returned {_describe(value)} as reward where a number is expected")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if problem := problem_of_reward(reward):
        raise UnusableError(f"{method} returned the reward {reward:g}, {problem}")
    return reward


def _is_content(value: Any) -> bool:
    if _is_part(value):
        return True
    return isinstance(value, list | tuple) and len(value) > 0 and all(_is_part(part) for part in value)


def _is_part(value: Any) -> bool:
    return isinstance(value, str | Image.Image) or (isinstance(value, np.ndarray) and value.ndim >= 2)


def _parts(content: Any, method: str, limits: ImageLimits) -> list[str | Picture]:
    items: Sequence[Any] = content if isinstance(content, list | tuple) else [content]
    if len(items) > MAX_PARTS:
        raise UnusableError(f"{method} returned {len(items)} texts and images; at most {MAX_PARTS} are allowed")
    parts: list[str | Picture] = []
    num_chars = num_pixels = 0
    for item in items:
        if isinstance(item, str):
            num_chars += len(item)
            if num_chars > MAX_CHARS:
                raise UnusableError(f"{method} returned more than {MAX_CHARS} characters")
            parts.append(item.encode(errors="replace").decode())  # lone surrogates are no text
            continue
        image = _image(item, method, limits)
        parts.append(_picture(image, f"an image that {method} returned", limits))
        num_pixels += image.width * image.height
        if num_pixels > limits.total_pixels:
            raise UnusableError(f"{method} returned images of more than {limits.total_pixels} pixels in total")
    return parts


def _image(item: Any, method: str, limits: ImageLimits) -> Image.Image:
    if isinstance(item, Image.Image):
        return item
    if not isinstance(item, np.ndarray):
        raise UnusableError(f"{method} returned {_describe(item)} where text or an image is expected")
    is_image = item.dtype == np.uint8 and (item.ndim == 2 or (item.ndim == 3 and item.shape[2] in (3, 4)))
    if not is_image or 0 in item.shape:
        raise UnusableError(
            f"{method} returned an array of {item.dtype} {list(item.shape)}; an image is [height, width, 3] of uint8"
        )
    try:  # before the pixels are copied
        check_size((item.shape[1], item.shape[0]), f"an image that {method} returned", limits.image_pixels)
    except DataError as error:
        raise UnusableError(str(error)) from error
    return Image.fromarray(np.ascontiguousarray(item))


def _picture(image: Image.Image, name: str, limits: ImageLimits) -> Picture:
    if min(image.size) < 1:
        raise UnusableError(f"{name} has {image.width}x{image.height} pixels")
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise UnusableError(
            f"{name} is too elongated ({image.width}x{image.height}): the aspect ratio may be at most "
            f"{MAX_ASPECT_RATIO}"
        )
    try:
        check_pixels(image, name, limits.image_pixels)
        rgb = upright_rgb(image, name, keep_open=True)
    except DataError as error:
        raise UnusableError(str(error)) from error
    return Picture(rgb.width, rgb.height, rgb.tobytes())


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
