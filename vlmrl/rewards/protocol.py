"""The requests and results of rewards, and their format on the wire: OpenRLHF's protocol, with more fields.

One POST, in JSON, of lists with one item per response:

    {"query": ["<prompt><response>"], "prompts": ["<prompt>"], "responses": ["<response>"], "labels": ["7"],
     "metadata": [{"family": "count"}], "images": [["c0ffee"]], "media": {"c0ffee": "data:image/png;base64,..."}}

`labels` holds null where a row has no label. `images` names the images of each response's prompt by the hash of their
content, in order; the lists are empty when `reward.remote_images` is `none`. With `data`, `media` holds each image of
the request once, however many responses there are, as PNG at the size that the model saw. Two more fields,

    {"messages": [[{"role": "user", "content": "..."}, {"role": "assistant", "content": "<response>"}]],
     "num_prompt_messages": [1]}

hold conversations: the messages of the prompt, then the response, or with an environment all responses and feedback.
The content of a message with images is a list of `{"type": "text", "text": "..."}` and `{"type": "image", "image":
"c0ffee"}`; with `none` the images are left out, and each content is a text. `num_prompt_messages` is null where
functions of TRL read prompt and response as texts; then all messages but the last are the prompt's. With an environment
`query` is the whole conversation as the policy read it, and `responses` holds the last response. The server's reply,

    {"rewards": [1.0]}

holds one number per response, in order; null means that the response could not be scored. It may hold `problems` (the
reason: a text or null per response), `failures` ("response", "infrastructure" or null per response: whose failure it
is; by default the response's) and `extra_logs` (name -> a number or null per response), whose values go to the metrics.

A vlmrl server needs only `responses` or `query` of a request, so that OpenRLHF's clients can use it too.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vlmrl.config.data import Columns
from vlmrl.config.serve import Serve
from vlmrl.data.media import ImageLimits, InlineMedia, TotalPixelsError, open_images
from vlmrl.data.unusable import check_depth
from vlmrl.errors import ConfigError, DataError
from vlmrl.rewards.function_worker import RewardResult, one_line, to_result
from vlmrl.rewards.messages import to_plain
from vlmrl.types import ChatMessage, Failure, Group, Media, Role
from vlmrl.video_size import VideoSize

MAX_PIXELS = Serve().max_request_pixels

Images = Literal["none", "data", "hash"]
"""Form of sent images: none, PNG, or the hash of their content."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardRequest:
    """A response to be scored."""

    source: str
    """The dataset and row of its prompt, for messages."""
    prompt: str
    """The rendered prompt."""
    response: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row that are plain JSON values."""
    media: tuple[Media, ...] = ()
    """The images of the prompt."""
    is_chat: bool = False
    """Whether TRL's functions read messages: the row's prompt is a list of them, or there is an environment."""
    label_key: str | None = None
    """The column of the label, if known."""
    prompt_messages: tuple[ChatMessage, ...] = ()
    """Messages of the prompt; without any its text is a user's message."""
    episode: tuple[ChatMessage, ...] = ()
    """Responses and feedback of a conversation with an environment; () for a single response."""
    rendered: str = ""
    """The conversation as one text, see `types.Episode`; empty for a single response."""

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The whole conversation."""
        beginning = self.prompt_messages or (ChatMessage("user", (*self.media, self.prompt)),)
        return beginning + (self.episode or (ChatMessage("assistant", (self.response,)),))

    @property
    def num_prompt_messages(self) -> int:
        """How many of `messages` are the prompt's."""
        return len(self.prompt_messages) or 1

    @property
    def all_media(self) -> tuple[Media, ...]:
        """The images of the whole conversation, in order."""
        return tuple(media for message in self.messages for media in message.media)

    @property
    def query(self) -> str:
        """Prompt and response, or the whole conversation, as one text."""
        return self.rendered or self.prompt + self.response


def reward_requests(group: Group) -> list[RewardRequest]:
    """Return one request per response of the group."""
    prompt = group.prompt
    return [
        RewardRequest(
            source=prompt.source,
            prompt=prompt.text,
            response=rollout.text,
            label=prompt.label,
            metadata=prompt.metadata,
            media=prompt.media,
            is_chat=prompt.is_chat or rollout.episode is not None,
            label_key=prompt.label_key,
            prompt_messages=prompt.messages,
            episode=() if rollout.episode is None else rollout.episode.messages,
            rendered="" if rollout.episode is None else rollout.episode.rendered,
        )
        for rollout in group.rollouts
    ]


class _Part(BaseModel):
    """A part of a message."""

    type: Literal["text", "image"]
    text: str = ""
    image: str = ""


class _Message(BaseModel):
    """A message; other fields are ignored."""

    role: Role
    content: str | list[_Part]


class _Request(BaseModel):
    """The fields of a request; unknown ones are ignored."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    query: list[str] | None = None
    prompts: list[str] | None = None
    responses: list[str] | None = None
    labels: list[str | None] | None = None
    metadata: list[dict[str, Any]] | None = None
    images: list[list[str]] | None = None
    messages: list[list[_Message]] | None = None
    num_prompt_messages: list[int | None] | None = None
    media: dict[str, str] = {}

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        lists = ("query", "prompts", "responses", "labels", "metadata", "images", "messages", "num_prompt_messages")
        lengths = {name: len(values) for name in lists if (values := getattr(self, name)) is not None}
        if self.query is None and self.responses is None:
            raise ValueError("there is neither query nor responses")
        if len(set(lengths.values())) > 1:
            raise ValueError(f"lists of different lengths: {lengths}")
        for number, messages in enumerate(self.messages or []):
            first = self.first_response(number)
            if not 0 < first < len(messages):
                raise ValueError(f"{first} of the {len(messages)} messages of response {number} are the prompt's")
        return self

    def first_response(self, number: int) -> int:
        """Return the index of the first message behind the prompt in the conversation with this number."""
        assert self.messages is not None
        given = None if self.num_prompt_messages is None else self.num_prompt_messages[number]
        return len(self.messages[number]) - 1 if given is None else given


class TooManyPixelsError(ValueError):
    """The images of a request have more pixels than the server takes."""


def read_request(content: bytes, *, wants_images: bool, max_pixels: int = MAX_PIXELS) -> list[RewardRequest]:
    """Parse a client's request. Images come from the request itself, never from a path or URL, and are opened only
    if the scorer `wants_images`.

    Raises ValueError, with one line for the client, for a request that is not in the format, and TooManyPixelsError for
    images that have more than `max_pixels` pixels together.
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
            check_depth(columns)  # too deep to pickle, for this request and those batched with it
        except DataError as error:
            raise ValueError(f"metadata.{number}: {error}") from error
    media = _open_media(request.media, max_pixels) if wants_images else {}
    texts = request.responses if request.responses is not None else request.query
    assert texts is not None, "checked by the request itself"
    requests = []
    for number, text in enumerate(texts):
        prompt = request.prompts[number] if request.prompts is not None else ""
        names = request.images[number] if wants_images and request.images is not None else []
        parsed = RewardRequest(
            source=f"response {number} of the request",
            prompt=prompt,
            response=text if request.responses is not None else text.removeprefix(prompt),
            label=request.labels[number] if request.labels is not None else None,
            metadata=request.metadata[number] if request.metadata is not None else {},
            media=tuple(_find(name, media) for name in names),
        )
        requests.append(_with_messages(parsed, request, number, media if wants_images else None))
    return requests


def _with_messages(
    parsed: RewardRequest, request: _Request, number: int, media: Mapping[str, Media] | None
) -> RewardRequest:
    """Add the conversation, if the client sent one; its images only if `media` is not None."""
    if request.messages is None:
        return parsed
    messages = tuple(ChatMessage(m.role, _parts(m.content, media)) for m in request.messages[number])
    first = request.first_response(number)
    is_chat = request.num_prompt_messages is not None and request.num_prompt_messages[number] is not None
    return replace(
        parsed,
        is_chat=is_chat,
        prompt_messages=messages[:first],
        episode=messages[first:],
        rendered=request.query[number] if is_chat and request.query is not None else "",
    )


def _parts(content: str | Sequence[_Part], media: Mapping[str, Media] | None) -> tuple[str | Media, ...]:
    if isinstance(content, str):
        return (content,)
    return tuple(
        part.text if part.type == "text" else _find(part.image, media)
        for part in content
        if part.type == "text" or media is not None
    )


def _find(name: str, media: Mapping[str, Media] | None) -> Media:
    if media is None or name not in media:
        raise ValueError(f"image {one_line(name)} is not in media: set reward.remote_images to data")
    return media[name]


def _open_media(media: Mapping[str, str], max_pixels: int) -> dict[str, InlineMedia]:
    """Decode the images. The keys stay the client's names."""
    for name, url in media.items():
        if not url.startswith("data:image/"):
            raise ValueError(f"media {one_line(name)} is no data:image/ URL")
    # All are data URLs: `open_images` gets no path or address from a client.
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
    # Not the client's hash, which may be any text: this one names files.
    digest = hashlib.blake2b(f"{image.size}".encode(), digest_size=16)
    digest.update(pixels.data)
    return InlineMedia(hash=digest.hexdigest(), size=image.size, pixels=pixels)


def write_request(requests: Sequence[RewardRequest], images: Images) -> bytes:
    """Return the body of a client's POST."""
    body: dict[str, Any] = {
        "query": [request.query for request in requests],
        "prompts": [request.prompt for request in requests],
        "responses": [request.response for request in requests],
        "labels": [request.label for request in requests],
        "metadata": [dict(request.metadata) for request in requests],
        "images": [[] if images == "none" else [media.hash for media in request.media] for request in requests],
    }
    name_of = None if images == "none" else _name
    body["messages"] = [to_plain(request.messages, name_of) for request in requests]
    body["num_prompt_messages"] = [request.num_prompt_messages if request.is_chat else None for request in requests]
    if images == "data":
        unique = {media.hash: media for request in requests for media in (*request.media, *request.all_media)}
        body["media"] = {name: _data_url(media) for name, media in unique.items()}
    return json.dumps(body).encode()


def _name(media: Media) -> str:
    return media.hash


def _data_url(media: Media) -> str:
    """Raises ConfigError for a video: servers read images."""
    if isinstance(media.size, VideoSize):
        raise ConfigError(
            "reward.remote_url: videos are not sent to reward servers yet; set reward.remote_images to hash or none"
        )
    file = io.BytesIO()
    Image.fromarray(media.fetch()).save(file, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read_results(content: bytes, num_responses: int) -> list[RewardResult]:
    """Parse a server's reply: one result per response.

    Raises ValueError for a reply that is not in the format; its text continues a sentence that starts with the server.
    """
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError) as error:
        text = one_line(content[:1000].decode(errors="replace"))
        raise ValueError(f"replied with what is not JSON: {text}") from error
    if not isinstance(reply, dict) or "rewards" not in reply:
        raise ValueError('replied without "rewards"')
    rewards = _column(reply["rewards"], num_responses, "rewards")
    problems = _column(reply.get("problems") or [None] * num_responses, num_responses, "problems")
    failures = _column(reply.get("failures") or [None] * num_responses, num_responses, "failures")
    logs = reply.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise ValueError(f'replied with "extra_logs" that are no object but a {type(logs).__name__}')
    columns = {name: _column(values, num_responses, name) for name, values in logs.items()}
    results = []
    for number, (reward, problem) in enumerate(zip(rewards, problems, strict=True)):
        # An invalid value that is only logged (the mean of nothing is NaN) must not invalidate the reward.
        parts = {name: values[number] for name, values in columns.items() if _is_number(values[number])}
        if reward is None:
            blame: Failure = "infrastructure" if failures[number] == "infrastructure" else "response"
            reason = one_line(problem or "the server gave no reward and no reason")
            results.append(RewardResult(problem=reason, blame=blame))
        else:
            results.append(to_result({**parts, "total": reward} if parts else reward))
    return results


def write_results(results: Sequence[RewardResult]) -> bytes:
    """Return the body of a server's reply."""
    names = sorted({name for result in results for name in result.parts})
    reply = {
        "rewards": [None if result.problem is not None else result.value for result in results],
        "problems": [result.problem for result in results],
        "failures": [result.failure for result in results],
        "extra_logs": {name: [result.parts.get(name) for result in results] for name in names},
    }
    return json.dumps(reply).encode()


def _is_number(value: Any) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _column(values: Any, num_responses: int, name: str) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f'replied with "{name}" that are no list but a {type(values).__name__}')
    if len(values) != num_responses:
        raise ValueError(f'replied with {len(values)} "{name}" for {num_responses} responses')
    return values
