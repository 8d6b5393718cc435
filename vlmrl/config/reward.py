"""What an answer is worth."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from vlmrl.config.base import ConflictError, Fraction, PositiveFloat, PositiveInt, Section

BUILT_IN = ("exact", "math", "format")
"""The reward functions that come with vlmrl: one file each in `rewards/`."""


class Scoring(Section):
    """Reward functions."""

    functions: dict[str, float] = Field(default_factory=lambda: {"math": 1.0})
    """Built-in reward functions and their weights: `exact`, `math`, `format`. By default `math`; none beside yours."""
    remote_url: str | None = None
    """Your own reward: `path/to/file.py:function`."""
    remote_weight: float = 1.0
    """Weight of your own reward beside `reward.functions`."""
    time_limit_s: PositiveFloat = 10.0
    """A reward function that takes longer for one answer is stopped, and the answer scores as failed."""
    num_workers: PositiveInt = 1
    """Processes that score answers."""
    max_failed_fraction: Fraction = 0.1
    """The run stops when more than this share of a step's answers could not be scored."""

    @field_validator("functions")
    @classmethod
    def check_functions(cls, functions: dict[str, float]) -> dict[str, float]:
        for name in functions:
            if name not in BUILT_IN:
                raise ValueError(
                    f"no reward function is called {name!r}: there are {', '.join(BUILT_IN)}; "
                    "your own goes to reward.remote_url path/to/file.py:function"
                )
        return functions

    @field_validator("remote_url")
    @classmethod
    def check_url(cls, url: str | None) -> str | None:
        if url is not None and (url.startswith(("http://", "https://")) or not all(url.rpartition(".py:")[::2])):
            raise ValueError("a reward of your own is path/to/file.py:function; reward servers are not built yet")
        return url

    @model_validator(mode="after")
    def leave_the_user_alone(self) -> Self:
        """A reward of the user's own is the only one, unless built-in ones are asked for beside it."""
        if self.remote_url is not None and "functions" not in self.model_fields_set:
            # Frozen is for those who read the settings; here they are still being made.
            self.__dict__["functions"] = {}
        return self

    @model_validator(mode="after")
    def check_anything_scores(self) -> Self:
        if not self.functions and self.remote_url is None:
            raise ConflictError(
                ["reward.functions is empty and reward.remote_url is not given: nothing would score the answers"]
            )
        return self


class Reward(Scoring):
    """Reward functions and the shaping of what they return."""

    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range before any baseline."""
    overlong_buffer_len: PositiveInt | None = None
    """Tokens before `rollout.max_new_tokens` over which the soft over-long penalty rises (DAPO)."""
    overlong_penalty_factor: float = Field(default=1.0, ge=0.0)
    """The soft over-long penalty at its largest."""
    stop_properly_penalty_coef: float | None = Field(default=None, le=1.0)
    """Truncated answers: in [0, 1] their reward is multiplied by it; below 0 it replaces the reward (ProRL)."""

    @model_validator(mode="after")
    def check_range(self) -> Self:
        if self.clip_range[0] >= self.clip_range[1]:
            raise ConflictError([f"reward.clip_range {self.clip_range} is empty: give the smaller bound first"])
        return self
