"""What a benchmark repeats."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.base import PositiveInt, Section
from vlmrl.config.train import Layout, Loop


class Repeats(Section):
    """Repetitions."""

    repeats: PositiveInt = 5
    """Measurements, after one that is thrown away."""


class Widths(Section):
    """Repetitions and the numbers of responses to compare."""

    n_samples_per_prompt: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (2, 16)
    """Responses per prompt; each number is measured by itself."""
    repeats: PositiveInt = 3
    """Measurements of each, after one that is thrown away."""


class Samples(Section):
    """Repetitions, layouts, and the made-up samples of one optimizer step."""

    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)] = ("padded", "packed", "shared")
    """Layouts to compare; the others are measured against the first."""
    groups: PositiveInt = 2
    """Prompts, each with images of its own."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses per prompt."""
    prompt_tokens: PositiveInt = 768
    """Tokens of a prompt, those of its images included."""
    response_tokens: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128,)
    """Tokens of a response. Several numbers are dealt out in turn: a ragged mix."""
    image_size: Annotated[int, Field(ge=0)] = 0
    """Pixels a side of each image, rounded to whole patches; 0: text only."""
    images_per_prompt: PositiveInt = 1
    """Images of a prompt."""
    repeats: PositiveInt = 5
    """Measurements of each layout, in turn, after one that is thrown away."""


class OneStep(Loop):
    """One optimizer step."""

    max_tokens_per_gpu: PositiveInt = 1_000_000_000
    """Token budget of one forward-backward pass; by default one pass holds all samples."""


class Head(Section):
    """Repetitions, and the shapes of an output layer."""

    vocabulary: PositiveInt = 151_936
    """Tokens that the output layer knows."""
    tokens: PositiveInt = 4096
    """Tokens to score."""
    hidden: PositiveInt = 256
    """Width of the hidden states; the logits are as many for any."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """Precision of hidden states and weight."""
    repeats: PositiveInt = 2
    """Measurements of each way, in turn, after one that finds the peak of memory."""
