"""The sources of rewards, and the shaping of rewards.

Below the sections: the checks of these against each other and against the rest of a run.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from vlmrl.config.base import ConflictError, Fraction, PositiveFloat, PositiveInt, Section, Text, Unread, names_function
from vlmrl.config.built_in import REWARD_FUNCTIONS, quoted
from vlmrl.config.names import is_given
from vlmrl.config.rollout import Rollout

_SCHEMES = ("http://", "https://")
_OF_SERVERS = ("remote_timeout_s", "remote_retries", "remote_batch_size", "remote_images")
_OF_FUNCTIONS = ("time_limit_s", "num_workers")
_NOT_PASSED = {"reward.pass_env": "reward.remote_url names no function of your own"}
_OF_MODELS = ("num_nodes", "num_gpus_per_node", "offload")
_OF_SCORER = ("train.max_tokens_per_gpu", "ds.param_dtype", "ds.attn_implementation", "ds.use_liger_kernel")
_OF_PROCESS = ("process_weight", "process_separator")


class Scoring(Section):
    """Reward functions and reward servers."""

    functions: dict[str, float] = Field(
        default_factory=lambda: {"math": 1.0},
        description=f"Built-in reward functions and their weights: {quoted(REWARD_FUNCTIONS)}; names alone (`math "
        "format`) weigh 1. By default `math`; none beside another source of rewards, and none for `serve-rm`.",
    )
    remote_url: str | tuple[Text, ...] | None = None
    """Your own reward: `path/to/file.py:function` (`reward_func` where none is named, as in OpenRLHF), which takes
    one response, or a batch as TRL's and OpenRLHF's do; or the `http://` or `https://` URL of a reward server (`vlmrl
    serve-rm`). Several URLs, separated by commas, are servers of the same reward: they share the work, and one that is
    down is left out."""
    remote_weight: float = 1.0
    """Weight of your own reward beside the other sources."""
    remote_timeout_s: PositiveFloat = 60.0
    """A reward server that takes longer for one request is asked again."""
    remote_retries: Annotated[int, Field(ge=0)] = 4
    """How often a request is repeated, with growing pauses, before its responses score as failed."""
    remote_batch_size: PositiveInt = 64
    """Most responses in one request."""
    remote_images: Literal["none", "data", "hash"] = "none"
    """What a reward server is sent of the images: nothing, the images as the model saw them (`data`), or the hashes of
    their content."""
    time_limit_s: PositiveFloat = 10.0
    """A reward function that takes longer for one response is stopped and called once more, alone in a fresh process;
    if that takes as long, the response scores as failed. A batch has the time of all its responses."""
    num_workers: PositiveInt = 1
    """Processes that score responses."""
    pass_env: tuple[Text, ...] = ()
    """Environment variables with tokens or keys that your own reward function needs, as OPENAI_API_KEY. Reward
    functions see no other variable whose name says that it holds a secret."""
    max_failed_fraction: Fraction = 0.1
    """The run stops when the infrastructure (servers, network, machine) failed more than this share of a step's
    responses. What a response does to its scorer is counted, and stops nothing unless `remote_url` scores no response
    at all. 1: neither stops it."""

    @field_validator("functions", mode="before")
    @classmethod
    def weigh_names(cls, given: Any) -> Any:
        """`math`, `math,format` or a list of names: each weighs 1."""
        names = given.replace(",", " ").split() if isinstance(given, str) else given
        if isinstance(names, list | tuple) and names and all(str(name).isidentifier() for name in names):
            return dict.fromkeys(names, 1.0)
        return given

    @field_validator("functions")
    @classmethod
    def check_functions(cls, functions: dict[str, float]) -> dict[str, float]:
        for name in functions:
            if name not in REWARD_FUNCTIONS:
                raise ValueError(
                    f"no reward function is called {name!r}: there are {', '.join(REWARD_FUNCTIONS)}; "
                    "your own goes to reward.remote_url path/to/file.py:function"
                )
        return functions

    @field_validator("remote_url")
    @classmethod
    def check_url(cls, given: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if given is None:
            return None
        listed = given.split(",") if isinstance(given, str) else given
        urls = [url.strip() for url in listed if url.strip()]
        if len(urls) == 1 and urls[0].endswith(".py") and not urls[0].startswith(_SCHEMES):
            urls = [f"{urls[0]}:reward_func"]
        if len(urls) == 1 and (names_function(urls[0]) or urls[0].startswith(_SCHEMES)):
            return urls[0]
        if len(urls) > 1 and all(url.startswith(_SCHEMES) for url in urls):
            return tuple(urls)
        raise ValueError(
            "a reward of your own is one path/to/file.py:function, or one or several URLs of servers, http://host:port"
        )

    @property
    def user_function(self) -> str | None:
        """`path/to/file.py:function` of `remote_url`; None when that is no function."""
        return None if self.remote_url is None or self.servers else str(self.remote_url)

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of `remote_url`; none when that is no server."""
        urls = (self.remote_url,) if isinstance(self.remote_url, str) else self.remote_url or ()
        return tuple(url for url in urls if url.startswith(_SCHEMES))

    @property
    def has_own_source(self) -> bool:
        """Something beside the built-in functions scores responses."""
        return self.remote_url is not None

    @model_validator(mode="after")
    def leave_the_user_alone(self) -> Self:
        """A source of the user's own is the only one, unless built-in functions are asked for beside it."""
        if self.has_own_source and "functions" not in self.model_fields_set:
            # Frozen is for those who read the settings; here they are still being made.
            self.__dict__["functions"] = {}
        return self

    @model_validator(mode="after")
    def check_anything_scores(self) -> Self:
        if not self.functions and not self.has_own_source:
            raise ConflictError(
                ["reward.functions is empty and reward.remote_url is not given: nothing would score the responses"]
            )
        return self


class Reward(Scoring):
    """Every source of rewards, and the shaping of what they return."""

    model_name_or_path: Text | None = None
    """Local folder or Hub id of a reward model: a sequence classifier with one label, or a model with a value head."""
    model_weight: float = 1.0
    """Weight of the reward model beside the other sources."""
    process_model_name_or_path: Text | None = None
    """Local folder or Hub id of a process reward model, which scores every step of a response."""
    process_weight: float = 1.0
    """Weight of the step scores, which are rewards of the tokens that end a step."""
    process_separator: Annotated[str, Field(min_length=1)] = "\n\n"
    """A step of a response ends with this text, the last one with the response."""
    num_nodes: PositiveInt = 1
    """Machines the reward models run on."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine."""
    offload: bool = False
    """Keep the weights of the reward models in CPU memory while they are not needed."""
    normalize_enable: bool = False
    """Subtract the mean and divide by the deviation that the reward model's config.json holds."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range before any baseline."""
    overlong_buffer_len: PositiveInt | None = None
    """Tokens before `rollout.max_new_tokens` over which the soft over-long penalty rises (DAPO)."""
    overlong_penalty_factor: float = Field(default=1.0, ge=0.0)
    """The soft over-long penalty at its largest."""
    stop_properly_penalty_coef: float | None = Field(default=None, le=1.0)
    """Truncated responses: c in [0, 1] leaves the smaller of their reward r and c r, c below 0 the smaller of r and c
    (ProRL), so that they never gain."""

    @property
    def has_model(self) -> bool:
        """A reward model runs beside the trainer, of responses or of their steps."""
        return self.model_name_or_path is not None or self.process_model_name_or_path is not None

    @property
    def has_own_source(self) -> bool:
        return super().has_own_source or self.has_model

    @model_validator(mode="after")
    def check_range(self) -> Self:
        if self.clip_range[0] >= self.clip_range[1]:
            raise ConflictError([f"reward.clip_range {self.clip_range} is empty: give the smaller bound first"])
        return self


def unread_of_sources(reward: Scoring) -> Unread:
    unread: Unread = {}
    if reward.remote_url is None:
        unread["reward.remote_weight"] = "there is no reward.remote_url"
    if not reward.servers:
        unread |= _all(_OF_SERVERS, "reward.remote_url names no reward server")
    if not reward.functions and reward.user_function is None:
        unread |= _all(_OF_FUNCTIONS, "no reward function scores responses")
    if reward.user_function is None:
        unread |= _NOT_PASSED
    if not reward.functions and reward.remote_url is None:
        unread |= _all(("max_failed_fraction",), "a reward model scores every response")
    return unread


def unread_of_models(reward: Reward) -> Unread:
    unread: Unread = {}
    if reward.model_name_or_path is None:
        unread |= _all(("model_weight", "normalize_enable"), "there is no reward.model_name_or_path")
    if reward.process_model_name_or_path is None:
        unread |= _all(_OF_PROCESS, "there is no reward.process_model_name_or_path")
    if not reward.has_model:
        unread |= _all(_OF_MODELS, "there is no reward model (reward.model_name_or_path)")
    return unread


def unread_of_shaping(reward: Reward) -> Unread:
    if reward.overlong_buffer_len is not None:
        return {}
    return {"reward.overlong_penalty_factor": "there is no penalty without reward.overlong_buffer_len"}


def conflicts_of_sampling(rollout: Rollout, reward: Reward) -> list[str]:
    conflicts = []
    if rollout.top_p < 1 and rollout.temperature != 1:
        conflicts.append(
            f"rollout.top_p {rollout.top_p:g} needs rollout.temperature 1, not {rollout.temperature:g}: "
            "below top_p 1 the engine knows the log-probs of the untempered model alone"
        )
    buffer = reward.overlong_buffer_len
    if buffer is not None and buffer > rollout.max_new_tokens:
        conflicts.append(
            f"reward.overlong_buffer_len {buffer} is longer than the longest response, rollout.max_new_tokens "
            f"{rollout.max_new_tokens}"
        )
    return conflicts


def conflicts_of_sources(reward: Reward) -> list[str]:
    """A source's name is that of its metric."""
    function = (reward.user_function or "").rpartition(":")[2]
    models = {"model": reward.model_name_or_path, "process": reward.process_model_name_or_path}
    if models.get(function) is None:
        return []
    return [f"reward.remote_url: your function is called {function}, as the reward model's metric is: rename yours"]


def unread_of_served(reward: Reward) -> Unread:
    """For `vlmrl serve-rm`."""
    if reward.model_name_or_path is None:
        names = (*(f"data.{name}" for name in ("max_len", "min_pixels", "max_pixels", "max_image_pixels")), *_OF_SCORER)
        reason = "functions are served, not a reward model"
        passed = _NOT_PASSED if reward.user_function is None else {}
        return dict.fromkeys((*names, "reward.normalize_enable"), reason) | passed
    return _all((*_OF_FUNCTIONS, "pass_env"), "a reward model is served, not functions")


def conflicts_of_served(reward: Reward) -> list[str]:
    """For `vlmrl serve-rm`."""
    if reward.servers:
        return ["reward.remote_url names another server: give the path/to/file.py:function that is to be served"]
    has_functions = reward.user_function is not None or (is_given(reward, "functions") and bool(reward.functions))
    if has_functions == (reward.model_name_or_path is not None):
        functions = "reward.remote_url path/to/file.py:function, reward.functions, or both"
        return [f"give either reward.model_name_or_path, or functions: {functions}"]
    return []


def _all(names: tuple[str, ...], reason: str) -> Unread:
    return dict.fromkeys((f"reward.{name}" for name in names), reason)
