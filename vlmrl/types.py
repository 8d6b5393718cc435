"""Types of the data in a run: Prompt -> Group -> Sample. Each is frozen, and complete when created.

Index t is about token t everywhere: `logprobs[t]` is the log-probability of `tokens[t]` given `tokens[:t]`, and
`sampled[t]` is True where the policy chose `tokens[t]`. The one shift by one lives in `models/inputs.py`.

The shape alphabet: N prompts, G responses per prompt, B samples (N * G), T tokens of a sample or row, V vocabulary,
D hidden size, P vision patches, H heads, L layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vlmrl.errors import ConfigError
from vlmrl.video_size import Size, placeholder

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Pixels = NDArray[np.uint8]
"""[height, width, 3] of an image, or [frames, height, width, 3] of a video, RGB."""

FinishReason = Literal["stop", "length"]
Failure = Literal["infrastructure", "response"]
"""Why a response has no score. `infrastructure` failed: it has no reward, and is in neither baseline nor loss. For the
`response` its scorer raised, or twice hung or died: it gets the smaller of 0 and its group's (or all) lowest reward."""
Retry = Literal["timeout", "death"]
"""Why a response was scored a second time: its scorer timed out, or its process died."""


class Media(Protocol):
    """A handle of one image or video: hash and size are known, pixels fetched on demand. Copies share the pixels."""

    @property
    def hash(self) -> str:
        """Hexadecimal digest of the pixels, of the resize settings that made them, and of a video's timing."""

    @property
    def size(self) -> Size:
        """(width, height) in pixels, after resizing; of a video also its frames and times."""

    def fetch(self) -> Pixels:
        """Return the pixels at the size that trainer and engine both use."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt, ready for engine and trainer."""

    index: int
    """Position in the endless stream of prompts: unique in a run. The seeds of its requests follow from it."""
    source: str
    """The dataset and row it came from, for messages: `visual_math:17`."""
    text: str
    """The rendered prompt, for users and reward functions."""
    tokens: Ints
    """[T] as the model reads it: each image placeholder expanded to one token per merged patch."""
    request: Ints
    """[T'] the same with one placeholder per image, as vLLM takes it."""
    label: str | None
    """The expected answer, if the data has one."""
    media: tuple[Media, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row that are plain JSON values."""
    answer: str | None = None
    """The target response of supervised training; None in other runs."""
    is_chat: bool = False
    """The row holds the question as a list of messages, not as one text."""
    label_key: str | None = None
    """The dataset column of the label."""
    question: Any = None
    """The question as the row has it, a text or a list of messages."""
    has_question: bool = True
    """False: the row only numbers an episode, for which an environment has to make the first message."""
    messages: tuple[ChatMessage, ...] = ()
    """The messages that `text` is the rendering of, with their images; () in checks, which render none."""


_MAX_SEED = 2**62 - 1
"""vLLM gives response k of a request the seed + k, as a signed 64-bit number: this leaves room for every k."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of the responses to a prompt. Raises ConfigError for values that no engine can sample with."""

    n: int
    """Responses per prompt."""
    temperature: float
    """Divides the logits; 0 is greedy."""
    top_p: float
    """Nucleus: the smallest set of tokens with this probability mass is sampled from."""
    max_new_tokens: int
    """Longest response, in tokens, the end token included."""
    seed: int
    """Seed of the run, or of one evaluation: requests with equal seed and equal prompt index draw equal noise."""
    stop: tuple[str, ...] = ()
    """Texts that end a response. The tokens up to the end of the text are sampled, and are part of the response."""

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_new_tokens < 1:
            raise ConfigError(f"cannot sample {self.n} responses of {self.max_new_tokens} tokens: both are at least 1")
        if self.n > 1 and self.temperature == 0.0:
            raise ConfigError(f"temperature 0 gives {self.n} times the same response: set one, or raise it")
        if self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"temperature {self.temperature} must be 0 or above, and top_p {self.top_p} in (0, 1]")

    def of_turn(self, *, episode: int, attempt: int, turn: int, max_new_tokens: int) -> Sampling:
        """Return the settings of one response in a conversation, with a seed of its own and at most this length."""
        name = f"{self.seed}/{episode}/{attempt}/{turn}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")
        return replace(self, n=1, max_new_tokens=min(self.max_new_tokens, max_new_tokens), seed=seed)

    def request_seed(self, index: int) -> int:
        """Seed of the request for the prompt with this index, in [0, 2**62).

        A hash and not `seed + index`: sums would give response 1 of one prompt the noise of response 0 of the next.
        """
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & _MAX_SEED


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy within a segment, and the reward that its environment gave for it."""

    start: int
    """Position of its first sampled token."""
    end: int
    """Position behind its last sampled token."""
    reward: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A sequence as the policy read and continued it: the trainer computes it in one pass.

    Example: prompt [5, 6], response [7, 2], feedback [8, 5], response [9, 2] -> tokens [5, 6, 7, 2, 8, 5, 9, 2],
    sampled [F, F, T, T, F, F, T, T], turns (2, 4) and (6, 8).
    """

    tokens: Ints
    """[T]"""
    sampled: Bools
    """[T] True where the policy chose the token; False on prompt, feedback and unsampled end-of-turn tokens."""
    logprobs: Floats
    """[T] from the engine; 0 where not sampled."""
    versions: Ints
    """[T] version of the weights that sampled the token; -1 where not sampled."""
    turns: tuple[Turn, ...]
    """The responses of the policy, in order. None without sampled tokens."""
    media: tuple[Media, ...] = ()
    """All images of the sequence, in the order of their tokens: those of the prompt, then those of feedback."""
    experts: NDArray[np.integer] | None = None
    """[R, L, K] experts of its first R tokens in each of L layers; -1, or None for all, where none was recorded."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.sampled), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"per-token fields of a segment differ in length: {sorted(lengths)}")
        in_turns = np.zeros_like(self.sampled)
        for turn in self.turns:
            in_turns[turn.start : turn.end] = True
        if not np.array_equal(in_turns, self.sampled):
            raise ValueError("the turns of a segment must hold its sampled tokens, and no others")

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())


StopReason = Literal["done", "context", "images", "turns", "raised", "failed"]
"""Why an episode ended: its environment was done; feedback would have exceeded `agent.context_len` or
`agent.max_images`; `agent.max_turns` were made; the environment raised, or failed more than `agent.max_retries`."""
Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation, for users and reward functions."""

    role: Role
    parts: tuple[str | Media, ...]
    """Text and images, in order."""
    reward: float | None = None
    """Reward of the environment for a response of the policy."""

    @property
    def text(self) -> str:
        """Its text, with `<image>` in place of each image and `<video>` of each video."""
        return "".join(part if isinstance(part, str) else placeholder(part.size) for part in self.parts)

    @property
    def media(self) -> tuple[Media, ...]:
        """Its images."""
        return tuple(part for part in self.parts if not isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Episode:
    """The course of a conversation with an environment."""

    stop: StopReason
    messages: tuple[ChatMessage, ...]
    """The conversation after the prompt."""
    rendered: str = ""
    """The conversation as one text with control tokens, from the prompt to the last response."""
    env_s: float = 0.0
    """Seconds spent in the environment, in all attempts."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Tool calls that could not be parsed, did not fit the schema, or raised."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of the gateway: name of the metric behind `agent/gateway/` -> number."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Other numbers that the agent returned beside its reward."""
    retried: tuple[str, ...] = ()
    """Why it was played again, each time, in one line for users: the environment hung, died or could not begin."""
    timeouts: int = 0
    """How many of those hung."""
    failure: Failure | None = None
    problem: str | None = None
    """Why it failed, in one line for users."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One response to a prompt, or one conversation that began with it.

    It counts as one response however many turns and segments it has.
    """

    segments: tuple[Segment, ...]
    """At least one. There are several where the chat template rewrote the history between turns, or an agent of the
    user's own held several conversations: each begins with its history, and a token is sampled in exactly one."""
    text: str
    """The last response of the policy, decoded without special tokens."""
    finish_reason: FinishReason
    """`length`: the last response was cut, or context, images or turns ran out."""
    episode: Episode | None = None
    """The course of a conversation with an environment; None for a single response."""

    @classmethod
    def of_response(
        cls,
        tokens: Ints,
        sampled: Bools,
        logprobs: Floats,
        text: str,
        finish_reason: FinishReason,
        version: int,
        media: tuple[Media, ...] = (),
    ) -> Rollout:
        """A single response: `sampled` is True on the tokens behind the prompt."""
        positions = np.flatnonzero(sampled)
        turns = (Turn(int(positions[0]), int(positions[-1]) + 1),) if len(positions) else ()
        segment = Segment(tokens, sampled, logprobs, np.where(sampled, version, -1), turns, media)
        return cls((segment,), text, finish_reason)

    @property
    def num_sampled(self) -> int:
        return sum(segment.num_sampled for segment in self.segments)

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions of the weights that sampled any of its tokens, the oldest first."""
        return tuple(sorted({int(v) for segment in self.segments for v in segment.versions[segment.sampled]}))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of all segments; their positions are those in their segments."""
        return tuple(turn for segment in self.segments for turn in segment.turns)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt and its G responses. The prompt's images are held once, however many responses there are."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def has_images(self) -> bool:
        """Whether its prompt or any feedback has an image."""
        return any(segment.media for segment in self.segments)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of all responses, in order."""
        return tuple(segment for rollout in self.rollouts for segment in rollout.segments)


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of one response."""

    total: float
    """The weighted sum, before shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The score of each reward source, unweighted."""
    failure: Failure | None = None
    """Why there is no score; None if there is one."""
    token_rewards: Floats | None = None
    """[T] rewards of single tokens by a process reward model, which `total` does not include, over the segments of the
    response; 0 elsewhere."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of an environment for the turns of a conversation, in order, which `total` does not include."""
    retried: Retry | None = None
    """Why it was scored twice, if it was; `failure` says whether the second attempt failed too."""
    problem: str | None = None
    """Why there is no score, in one line for users: the error and where it was raised."""

    @property
    def failed(self) -> bool:
        """There is no score."""
        return self.failure is not None

    @property
    def has_reward(self) -> bool:
        """The response has a reward, and so enters baseline and loss."""
        return self.failure != "infrastructure"

    @property
    def earned(self) -> float:
        """The total plus all rewards of tokens and turns, before shaping."""
        total = self.total + sum(self.turn_rewards)
        return total if self.token_rewards is None else total + float(self.token_rewards.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A sequence to train on, and which of its tokens were sampled."""

    tokens: Ints
    """[T]"""
    sampled: Bools
    """[T] True on the tokens that enter the loss."""
    media: tuple[Media, ...] = ()
    group: int = 0
    """Number of its prompt in the batch."""
    source: str = ""
    """The dataset and row of its prompt, for messages."""
    prefix: int | None = None
    """Number of tokens before the response, for a sample that is left out of the loss: its `sampled` is all False."""
    response: int | None = None
    """Number of its response in the batch, for samples that are segments of responses; None: a response by itself."""
    response_tokens: int | None = None
    """Sampled tokens of the whole response; None: its own."""
    shares_prompt: bool = True
    """It begins with the prompt of its group; False where a chat template has rewritten the history."""
    experts: NDArray[np.integer] | None = None
    num_prompt_images: int | None = None
    """How many of its images are those of the prompt, which the samples of a group share; None: all."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.sampled):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.sampled)} values of `sampled`")

    def left_out(self) -> Sample:
        """Return a copy with no token in the loss."""
        return replace(self, sampled=np.zeros_like(self.sampled), prefix=self.prompt_length)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one; all if none was sampled."""
        length = int(self.sampled.argmax()) if self.sampled.any() else len(self.tokens)
        return length if self.prefix is None else self.prefix

    @property
    def prompt_media(self) -> tuple[Media, ...]:
        """Images of the prompt."""
        return self.media[: self.num_prompt_images]

    @property
    def length_of_response(self) -> int:
        """Sampled tokens of the whole response."""
        return int(self.sampled.sum()) if self.response_tokens is None else self.response_tokens


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of one optimizer step over all ranks and micro-batches, by which the loss is divided."""

    num_tokens: int
    """Sampled tokens."""
    num_responses: int
    """Responses with a sampled token."""


Layout = Literal["padded", "packed", "shared"]
Part = Literal["whole", "base", "adapter"]
"""The part of a model that is synced: the model with its adapters merged, the model without them, or the adapters."""
Metrics = dict[str, float]
"""`area/quantity` -> value, one step's worth."""
