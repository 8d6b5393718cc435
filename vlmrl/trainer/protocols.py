"""Protocols of the parts of a training loop. Handles of Ray actors implement them in runs, fakes in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from vlmrl.data.experience import Experience
from vlmrl.types import Floats, Group, Metrics, Prompt, Sample, Sampling, Score


class Prompts(Protocol):
    """The endless stream of training prompts."""

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        """Return the next `count` prompts, and metrics of fetching them."""


class Engine(Protocol):
    """Samples responses."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        """Return one group per prompt, in order; call `on_group` with each group once it is complete, in any order."""


class Rewarder(Protocol):
    """Scores responses."""

    def begin(self, group: Group) -> None:
        """Start scoring a group and return at once; `score` collects the result."""

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        """Return one score per response, group by group.

        Args:
            out_of: number of responses in the whole step, which these are a part of; None: these are all.
            failed: how many of the step's other responses have no reward because the infrastructure failed.
        """


class Reference(Protocol):
    """A model that computes log-probs and is never trained."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample."""


class Policy(Reference, Protocol):
    """The model that is trained."""

    def update(self, experience: Experience, *, step: int) -> Metrics:
        """Train on the experience, in one or several optimizer steps."""

    def take_pass_metrics(self) -> Metrics:
        """Return the metrics of the passes since the last call, over all models."""


class WeightSync(Protocol):
    """Syncs the policy's weights to the engines."""

    def sync(self, version: int) -> Metrics:
        """Send the current weights to all engines, and verify that they arrived."""


class Critic(Protocol):
    """The value model."""

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return one array of [T] per sample: the expected return from each sampled token on; 0 elsewhere."""

    def update(self, experience: Experience, *, step: int) -> Metrics:
        """Train on the experience's returns, in one or several optimizer steps."""


class Report(Protocol):
    """Shows the progress of a run."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure a part of the step as `time/<name>_s`."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Report a finished step."""
