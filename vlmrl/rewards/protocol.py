"""What travels between `http.py` and a reward server: OpenRLHF's protocol, with more fields.

One POST, in JSON, of lists that run over the answers of the request:

    {"query": ["<prompt><response>"], "prompts": ["<prompt>"], "responses": ["<response>"], "labels": ["7"],
     "metadata": [{"family": "count"}], "images": [["c0ffee"]], "media": {"c0ffee": "data:image/png;base64,..."}}

`labels` holds null where a row has no label. `images` names the images of each answer's prompt by the hash of their
content, in order; the lists are empty when `reward.remote_images` is `none`. With `data`, `media` brings each of these
images once, however many answers there are, as PNG at the size that the model saw. The server's answer,

    {"rewards": [1.0]}

holds one number per answer, in order; null says that this answer could not be scored. It may hold `problems` (why: a
text or null per answer), `failures` (whose doing that is: "response" or "infrastructure", or null, per answer; without
them it is the response's) and `extra_logs` (name -> a number or null per answer), whose values are for the metrics.

Of a request, a server of ours needs `responses` or `query` alone, so that OpenRLHF's clients may ask it too.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vlmrl.config.data import Columns
from vlmrl.config.serve import Serve
from vlmrl.data.media import ImageLimits, InlineMedia, TotalPixelsError, open_images
from vlmrl.data.unusable import check_depth
from vlmrl.errors import DataError
from vlmrl.rewards.local_worker import Verdict, one_line, to_verdict
from vlmrl.rewards.question import Question
from vlmrl.types import Failure, Media

MAX_PIXELS = Serve().max_request_pixels

Images = Literal["none", "data", "hash"]
"""What is sent of the images."""


class _Request(BaseModel):
    """What a client may send; unknown fields are left alone."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    query: list[str] | None = None
    prompts: list[str] | None = None
    responses: list[str] | None = None
    labels: list[str | None] | None = None
    metadata: list[dict[str, Any]] | None = None
    images: list[list[str]] | None = None
    media: dict[str, str] = {}

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        lists = ("query", "prompts", "responses", "labels", "metadata", "images")
        lengths = {name: len(found) for name in lists if (found := getattr(self, name)) is not None}
        if self.query is None and self.responses is None:
            raise ValueError("there is neither query nor responses")
        if len(set(lengths.values())) > 1:
            raise ValueError(f"lists of different lengths: {lengths}")
        return self


class TooManyPixelsError(ValueError):
    """The images of a request are more than a server takes."""


def read_request(content: bytes, *, wants_images: bool, max_pixels: int = MAX_PIXELS) -> list[Question]:
    """The answers that a client wants scored. Images come from the request itself, never from a path or an address,
    and are opened only where somebody `wants_images`.

    Raises ValueError, in one line for the client, for what is not the protocol, and TooManyPixelsError for images that
    have more than `max_pixels` pixels together.
    """
    try:
        request = _Request.model_validate(json.loads(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(one_line(f"{where}: {first['msg']}" if where else first["msg"])) from error
    except (ValueError, RecursionError) as error:
        raise ValueError("the request is not JSON") from error
    for number, columns in enumerate(request.metadata or []):
        try:
            check_depth(columns)  # no process could be told of it, and with it of what others ask
        except DataError as error:
            raise ValueError(f"metadata.{number}: {error}") from error
    media = _open_media(request.media, max_pixels) if wants_images else {}
    texts = request.responses if request.responses is not None else request.query
    assert texts is not None, "checked by the request itself"
    questions = []
    for number, text in enumerate(texts):
        prompt = request.prompts[number] if request.prompts is not None else ""
        names = request.images[number] if wants_images and request.images is not None else []
        if missing := [name for name in names if name not in media]:
            raise ValueError(f"image {one_line(missing[0])} is not in media: set reward.remote_images to data")
        questions.append(
            Question(
                source=f"answer {number} of the request",
                prompt=prompt,
                response=text if request.responses is not None else text.removeprefix(prompt),
                label=request.labels[number] if request.labels is not None else None,
                metadata=request.metadata[number] if request.metadata is not None else {},
                media=tuple(media[name] for name in names),
            )
        )
    return questions


def _open_media(media: Mapping[str, str], max_pixels: int) -> dict[str, InlineMedia]:
    """The images by the client's names."""
    for name, url in media.items():
        if not url.startswith("data:image/"):
            raise ValueError(f"media {one_line(name)} is no data:image/ URL")
    # None of them may be a file or an address: nothing is in reach.
    images = open_images(media.values(), limits=ImageLimits.of(Columns())._replace(total_pixels=max_pixels))
    opened = {}
    for name in media:
        try:
            opened[name] = _to_media(next(images))
        except TotalPixelsError as error:
            raise TooManyPixelsError(f"{error}: send fewer, or raise serve.max_request_pixels") from error
        except DataError as error:
            raise ValueError(f"media {one_line(name)}: {error}") from error
    return opened


def _to_media(image: Image.Image) -> InlineMedia:
    pixels = np.asarray(image, dtype=np.uint8)
    # A hash of our own: it names files, and the client's may be any text.
    digest = hashlib.blake2b(f"{image.size}".encode(), digest_size=16)
    digest.update(pixels.data)
    return InlineMedia(hash=digest.hexdigest(), size=image.size, pixels=pixels)


def write_request(questions: Sequence[Question], images: Images) -> bytes:
    """What the client sends."""
    asked: dict[str, Any] = {
        "query": [question.prompt + question.response for question in questions],
        "prompts": [question.prompt for question in questions],
        "responses": [question.response for question in questions],
        "labels": [question.label for question in questions],
        "metadata": [dict(question.metadata) for question in questions],
        "images": [[] if images == "none" else [one.hash for one in question.media] for question in questions],
    }
    if images == "data":
        unique = {one.hash: one for question in questions for one in question.media}
        asked["media"] = {name: _data_url(one) for name, one in unique.items()}
    return json.dumps(asked).encode()


def _data_url(media: Media) -> str:
    file = io.BytesIO()
    Image.fromarray(media.fetch()).save(file, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read_answer(content: bytes, num_answers: int) -> list[Verdict]:
    """One verdict per answer, from what the server sent.

    Raises ValueError, in words that may follow the server's name, for what is not the protocol.
    """
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        said = one_line(content[:1000].decode(errors="replace"))
        raise ValueError(f"answered with what is not JSON: {said}") from error
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise ValueError('answered without "rewards"')
    rewards = _column(answer["rewards"], num_answers, "rewards")
    problems = _column(answer.get("problems") or [None] * num_answers, num_answers, "problems")
    failures = _column(answer.get("failures") or [None] * num_answers, num_answers, "failures")
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise ValueError(f'answered with "extra_logs" that are no object but a {type(logs).__name__}')
    columns = {name: _column(values, num_answers, name) for name, values in logs.items()}
    verdicts = []
    for number, (reward, problem) in enumerate(zip(rewards, problems, strict=True)):
        # What is only logged (the mean of nothing is NaN) takes no reward with it.
        parts = {name: values[number] for name, values in columns.items() if _is_number(values[number])}
        if reward is None:
            blame: Failure = "infrastructure" if failures[number] == "infrastructure" else "response"
            said = one_line(problem or "the server gave no reward and no reason")
            verdicts.append(Verdict(problem=said, blame=blame))
        else:
            verdicts.append(to_verdict({**parts, "total": reward} if parts else reward))
    return verdicts


def write_answer(verdicts: Sequence[Verdict]) -> bytes:
    """What the server sends."""
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    answer = {
        "rewards": [None if verdict.problem is not None else verdict.value for verdict in verdicts],
        "problems": [verdict.problem for verdict in verdicts],
        "failures": [verdict.failure for verdict in verdicts],
        "extra_logs": {name: [verdict.parts.get(name) for verdict in verdicts] for name in names},
    }
    return json.dumps(answer).encode()


def _is_number(value: Any) -> bool:
    """A finite one."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _column(values: Any, num_answers: int, name: str) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f'answered with "{name}" that are no list but a {type(values).__name__}')
    if len(values) != num_answers:
        raise ValueError(f'answered with {len(values)} "{name}" for {num_answers} answers')
    return values
