"""The sections of the benchmarks: repetitions, shapes and synthetic samples."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.base import NonNegativeFloat, PositiveInt, Section
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
