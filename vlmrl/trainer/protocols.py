"""Protocols of the parts of a training loop. Handles of Ray actors implement them in runs, fakes in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from vlmrl.data.experience import Experience
from vlmrl.types import Floats, Group, Metrics, Prompt, Sample, Sampling, Score


class Resumable(Protocol):
    """A position in the training data, as checkpoints need it."""

    @property
    def num_rows(self) -> int:
        """Rows of one episode."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run continues from, as plain JSON values. `position` counts the prompts that the run
        has used."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class Prompts(Resumable, Protocol):
    """The endless stream of training prompts."""

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        """Return the next `count` prompts, and metrics of fetching them."""


class Rollouts(Protocol):
    """The source of a run's responses, in the order of the prompts. It starts to score them as they are complete."""

    def take(self, count: int) -> tuple[list[Group], Metrics]:
        """Return the responses to the next `count` prompts, in order, and metrics of fetching these."""

    def settle(self) -> None:
        """Prepare for new weights, right before they are synced to the engines."""

    def published(self, version: int) -> None:
        """Note that the engines hold this version. Also called before the first step."""


class Engine(Protocol):
    """Samples responses."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        """Return one group per prompt, in order; call `on_group` with each group once it is complete, in any order."""


class QueueingEngine(Protocol):
    """Samples responses in the background. What was under way in an engine that died is sampled again."""

    def submit(self, prompt: Prompt, sampling: Sampling, on_done: Callable[[Callable[[], Group | None]], None]) -> None:
        """Start to sample responses to a prompt, and return at once.

        Args:
            on_done: called in any thread when it has ended, with a function that returns the group or raises; call that
                in the thread that submits. It returns None if the responses are sampled again: then `on_done` is
                called again.
        """

    @property
    def needs_repair(self) -> bool:
        """Whether an engine has died."""

    @property
    def is_down(self) -> bool:
        """Whether responses wait for an engine to be started again."""

    def repair(self) -> None:
        """Start engines that have died again, with the current weights. Call it only while the policy holds the version
        that was published last. A weight sync repairs them too."""


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
