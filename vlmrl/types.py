"""What flows through a run: Prompt -> Group -> Sample -> Experience. Each is frozen, and complete when made.

Index t is about token t everywhere: `logprobs[t]` is the log-probability of `tokens[t]` given `tokens[:t]`, and
`sampled[t]` is True where the policy chose `tokens[t]`. The one shift by one lives in `models/inputs.py`.

The shape alphabet of the project: N prompts, G answers per prompt, B samples (N * G), T tokens of a sample or of a row,
V vocabulary, D hidden size, P vision patches, H heads, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Pixels = NDArray[np.uint8]
"""[height, width, 3], RGB."""

FinishReason = Literal["stop", "length"]
Failure = Literal["infrastructure", "response"]
"""Why a response could not be scored. `infrastructure`: a server, the network or the machine failed, so nobody knows
what it is worth, and it is in no baseline and in no loss. `response`: its own doing (its scorer raised, twice hung
or died), and it is worth the smaller of 0 and the lowest scored reward of its group, or of all groups where its own has
none."""
Retry = Literal["timeout", "death"]
"""Why a response was scored a second time: its scorer ran too long, or its process died."""


class Media(Protocol):
    """One image: a name and a size now, the pixels when somebody asks. It is a handle: copying it copies no pixels."""

    @property
    def hash(self) -> str:
        """Hexadecimal digest of the pixels and of the resize settings that made them."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, after resizing."""

    def fetch(self) -> Pixels:
        """The pixels, [height, width, 3], already at the size that trainer and engine both use."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One question, ready for the engine and for the trainer."""

    index: int
    """Its place in the endless stream of prompts: unique in a run. The seeds of its requests follow from it."""
    source: str
    """The dataset and row it came from, for messages: `visual_math:17`."""
    text: str
    """The rendered prompt, for people and for reward functions."""
    tokens: Ints
    """[T] as the model reads it: each image placeholder expanded to one token per merged patch."""
    request: Ints
    """[T'] the same with one placeholder per image, which is how vLLM takes it."""
    label: str | None
    """The expected answer, when the data has one."""
    media: tuple[Media, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row that are plain JSON values."""
    answer: str | None = None
    """What the model should say, for supervised training; None in every other run."""
    is_chat: bool = False
    """The row holds the question as a list of messages, not as one text."""
    label_key: str | None = None
    """The column of its dataset that the label is from."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One answer, with its prompt in front: `tokens` starts with the prompt's `tokens`.

    Example: prompt [5, 6], answer [7, 2] -> tokens [5, 6, 7, 2], sampled [F, F, T, T], logprobs [0, 0, -0.1, -0.3].
    """

    tokens: Ints
    """[T]"""
    sampled: Bools
    """[T] True where the policy chose the token; False on prompt and environment tokens."""
    logprobs: Floats
    """[T] from the engine; 0 where not sampled."""
    text: str
    """The answer, decoded without special tokens."""
    finish_reason: FinishReason
    version: int
    """Version of the weights that produced it."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.sampled), len(self.logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"per-token fields of a rollout differ in length: {sorted(lengths)}")

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt and its G answers. The prompt's images are held once, however many answers there are."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """What the reward functions said of one answer."""

    total: float
    """The weighted sum, before any shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Each reward function's own score, unweighted."""
    failure: Failure | None = None
    """Why there is no score; None: there is one."""
    token_rewards: Floats | None = None
    """[T] what a process reward model pays at single tokens, beside `total`; 0 elsewhere. T is that of the rollout."""
    retried: Retry | None = None
    """Why it was scored twice, if it was; `failure` says whether the second time was as bad."""
    problem: str | None = None
    """One line on what went wrong where there is no score: the error and its place, for people."""

    @property
    def failed(self) -> bool:
        """There is no score, for whatever reason."""
        return self.failure is not None

    @property
    def has_reward(self) -> bool:
        """Something is known of what the response is worth: it takes part in baseline and loss."""
        return self.failure != "infrastructure"

    @property
    def earned(self) -> float:
        """All that the answer is paid, at its end and on its way, before any shaping."""
        return self.total if self.token_rewards is None else self.total + float(self.token_rewards.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence to train on: what the model reads, and which of its tokens it is responsible for."""

    tokens: Ints
    """[T]"""
    sampled: Bools
    """[T] True on the tokens that enter the loss."""
    media: tuple[Media, ...] = ()
    group: int = 0
    """Which prompt of the batch it answers: samples of one group begin with the same tokens and the same media."""
    source: str = ""
    """The dataset and row of its prompt, for messages."""
    prefix: int | None = None
    """Tokens before the response, where `sampled` does not tell: a response without a reward is left out of the loss,
    all of it."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.sampled):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.sampled)} flags of what was sampled")

    def left_out(self) -> Sample:
        """The same, with no token in the loss."""
        return replace(self, sampled=np.zeros_like(self.sampled), prefix=self.prompt_length)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that was sampled; all of them when none was."""
        if self.prefix is not None:
            return self.prefix
        return int(self.sampled.argmax()) if self.sampled.any() else len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """A batch of samples and everything that the loss needs to know of each token. Lists run over samples."""

    samples: Sequence[Sample]
    """B of them."""
    advantages: Sequence[Floats]
    """B arrays of [T]; 0 where not sampled."""
    old_logprobs: Sequence[Floats] | None
    """B arrays of [T]: the policy when the experience was made, recomputed by the trainer. None: the policy is still
    the same, and finds them while it learns."""
    rollout_logprobs: Sequence[Floats]
    """B arrays of [T]: the rollout engine's own."""
    ref_logprobs: Sequence[Floats] | None = None
    """B arrays of [T], or None when no reference takes part in the loss."""
    values: Sequence[Floats] | None = None
    """B arrays of [T]: what the critic predicted when the experience was made; None without a critic."""
    returns: Sequence[Floats] | None = None
    """B arrays of [T]: what it should have predicted."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss."""
    span: tuple[float, float] | None = None
    """Which share of the run it stands for, from 0 to 1, where optimizer steps do not say how far the run is: with
    dynamic filtering a step takes as many prompts as it needs. The learning rate follows it. None: it counts steps."""

    def __post_init__(self) -> None:
        lengths = [len(s.tokens) for s in self.samples]
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None and [len(row) for row in column] != lengths:
                raise ValueError(f"the {name} of an experience do not line up with its samples")

    def select(self, rows: Sequence[int]) -> Experience:
        """The experience of these samples alone, in this order."""
        return self.rearranged([self.samples[r] for r in rows], lambda column: [column[r] for r in rows])

    def rearranged(self, samples: Sequence[Sample], pick: Callable[[Sequence[Floats]], Sequence[Floats]]) -> Experience:
        """The same of `samples`, with what `pick` makes of every column that there is."""
        picked: dict[str, Any] = {
            name: pick(getattr(self, name)) for name in _COLUMNS if getattr(self, name) is not None
        }
        return replace(self, samples=samples, **picked)


_COLUMNS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns")


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of one optimizer step over all ranks and micro-batches: what the loss is divided by."""

    num_tokens: int
    """Sampled tokens."""
    num_samples: int
    """Samples with a sampled token."""


Layout = Literal["padded", "packed", "shared"]
Part = Literal["whole", "base", "adapter"]
"""What of a model is sent: all of it, adapters merged in; all of it without them; or its adapters alone."""
Metrics = dict[str, float]
"""`area/quantity` -> value, one step's worth."""
