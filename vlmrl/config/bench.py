"""The sections of the benchmarks: repetitions, shapes and synthetic samples."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from vlmrl.config.rollout import Rollout
from vlmrl.config.train import Layout, Loop


class Repeats(Section):
    """Repetitions."""

    repeats: PositiveInt = 5
    """Measurements, after one that is discarded."""


class ResponseCounts(Section):
    """Repetitions and the numbers of responses to compare."""

    n_samples_per_prompt: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (2, 16)
    """Numbers of responses per prompt; each is measured separately."""
    repeats: PositiveInt = 3
    """Measurements of each number, after one that is discarded."""


class Conversations(Section):
    """Repetitions, and the conversations of one engine with environments that wait."""

    episodes: PositiveInt = 1000
    """Conversations at the same time."""
    turns: PositiveInt = 3
    """Responses of each."""
    response_tokens: PositiveInt = 64
    """Longest response, in tokens; one that ends earlier is shorter in both measurements."""
    step_s: NonNegativeFloat = 0.2
    """Seconds that an environment takes for each response."""
    repeats: PositiveInt = 1
    """Measurements, after one of a few conversations that is discarded."""


class AsyncRollout(Rollout):
    """Sampling of responses for training."""

    batch_size: PositiveInt = 8
    """Prompts per step."""
    n_samples_per_prompt: PositiveInt = 4
    """Responses per prompt."""


Workload = Literal["environment", "long_tail", "equal_lengths"]


class Asynchrony(Section):
    """Repetitions, and the steps of a run that is synchronous and asynchronous in turn."""

    workload: Workload = "environment"
    """`environment`: conversations with an environment that waits. `long_tail`: responses without an environment, whose
    lengths are log-normal over prompts, with sigma 1. `equal_lengths`: the same with one length. Without an environment
    no token ends a response before its length. On CPU engine and trainer compute with half of the cores each, in all
    modes."""
    step_s: NonNegativeFloat = 0.2
    """Seconds that the environment takes for each response."""
    turns: PositiveInt = 1
    """Responses of a conversation with the environment."""
    response_tokens: PositiveInt = 16
    """Tokens of a response: of the longest with an environment, of the median with a long tail, else of each."""
    queue_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2)
    """Values of `train.async_queue_size`; each is measured with and without `train.partial_rollout_enable`."""
    steps: PositiveInt = 6
    """Measured steps of each mode in a round, after some that are discarded while the queue fills."""
    rounds: PositiveInt = 3
    """Rounds over all modes, in turn; results are medians over them."""


class SyntheticBatch(Section):
    """Repetitions, layouts, and the synthetic samples of one optimizer step."""

    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)] = ("padded", "packed", "shared")
    """Layouts to compare; the others are measured against the first."""
    groups: PositiveInt = 2
    """Prompts, each with its own images."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses per prompt."""
    prompt_tokens: PositiveInt = 768
    """Tokens of a prompt, those of its images included."""
    response_tokens: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128,)
    """Tokens of a response. Several numbers are assigned in turn, for responses of different lengths."""
    image_size: Annotated[int, Field(ge=0)] = 0
    """Side length of each image in pixels, rounded to whole patches; 0: text only."""
    images_per_prompt: PositiveInt = 1
    """Images of a prompt."""
    repeats: PositiveInt = 5
    """Measurements of each layout, alternating, after one that is discarded."""


class ChatRows(Section):
    """Repetitions, and the rows of one optimizer step of supervised training."""

    rows: PositiveInt = 32
    """Rows of a step; a third of each is its prompt."""
    mean_tokens: PositiveInt = 300
    """Mean length of a row. Lengths are log-normal."""
    max_tokens: PositiveInt = 2048
    """Length of the longest row."""
    sigma: PositiveFloat = 1.0
    """Standard deviation of the logarithm of a length."""
    padded_rows: PositiveInt = 8
    """Rows of one padded pass, in the order of the data."""
    repeats: PositiveInt = 3
    """Measurements of each layout, alternating, after one that is discarded."""


class PairBatch(SyntheticBatch):
    """Repetitions, layouts, and the synthetic pairs of one optimizer step."""

    groups: PositiveInt = 8
    """Pairs, each with its own prompt."""
    n_samples_per_prompt: PositiveInt = 2
    """Responses of a pair."""
    prompt_tokens: PositiveInt = 512
    """Tokens of a prompt, those of its images included."""


class OneStep(Loop):
    """One optimizer step."""

    max_tokens_per_gpu: PositiveInt = 1_000_000_000
    """Token budget of one forward-backward pass; by default one pass holds all samples."""


class OutputLayer(Section):
    """Repetitions, and the shapes of an output layer."""

    vocabulary: PositiveInt = 151_936
    """Size of the vocabulary."""
    tokens: PositiveInt = 4096
    """Tokens to score."""
    hidden: PositiveInt = 256
    """Hidden size; the number of logits does not depend on it."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """Precision of hidden states and weights."""
    repeats: PositiveInt = 2
    """Measurements of each method, alternating, after one that measures peak memory."""
