"""Responses on demand: a step draws its prompts and samples their responses, while the trainer waits."""

from __future__ import annotations

from typing import Any

from vlmrl.config.verbs import RlConfig
from vlmrl.trainer.protocols import Engine, Prompts, Report, Rewarder
from vlmrl.types import Group, Metrics, Sampling


class InTurn:
    """Rollouts for engines and a trainer that take turns: all responses come from the newest weights."""

    def __init__(
        self, config: RlConfig, *, prompts: Prompts, engine: Engine, rewarder: Rewarder, report: Report
    ) -> None:
        self._prompts, self._engine, self._rewarder, self._report = prompts, engine, rewarder, report
        self._sampling = training_sampling(config)

    def take(self, count: int) -> tuple[list[Group], Metrics]:
        with self._report.phase("data"):
            prompts, metrics = self._prompts.draw(count)
        with self._report.phase("rollout"):
            return self._engine.generate(prompts, self._sampling, self._rewarder.begin), metrics

    def settle(self) -> None:
        """Do nothing: no response is under way between two steps."""

    def published(self, version: int) -> None:
        """Do nothing: the next responses are sampled when a step asks for them."""

    @property
    def num_rows(self) -> int:
        return self._prompts.num_rows

    def state(self) -> dict[str, Any]:
        return self._prompts.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of this class, or of `Ahead`, whose responses ahead are sampled again."""
        stream = state["ahead"]["stream"] if "ahead" in state else state
        self._prompts.load_state(stream)
        if skipped := state["position"] - stream["position"]:
            self._prompts.draw(skipped)


def training_sampling(config: RlConfig) -> Sampling:
    """Sampling settings of training."""
    return Sampling(
        n=config.rollout.n_samples_per_prompt,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed,
    )
