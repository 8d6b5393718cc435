"""The reward sources and the shaping of rewards, and their checks."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from vlmrl.config.base import (
    ConflictError,
    Fraction,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    Unread,
    is_function_spec,
)
from vlmrl.config.built_in import REWARD_FUNCTIONS, quoted
from vlmrl.config.names import is_given
from vlmrl.config.rollout import Rollout

_SCHEMES = ("http://", "https://")
_SERVER_SETTINGS = ("remote_timeout_s", "remote_retries", "remote_batch_size", "remote_images")
_FUNCTION_SETTINGS = ("time_limit_s", "num_workers")
_NOT_PASSED = {"reward.pass_env": "reward.remote_url names no function of your own"}
_MODEL_SETTINGS = ("num_nodes", "num_gpus_per_node", "offload")
_SCORER_SETTINGS = ("train.max_tokens_per_gpu", "ds.param_dtype", "ds.attn_implementation", "ds.use_liger_kernel")
_PROCESS_SETTINGS = ("process_weight", "process_separator")
_SETTINGS_BESIDE_MODELS = ("train.max_tokens_per_gpu", "train.colocate_all", "vllm.enable_sleep", "ds.zero_stage")
SHAPING = ("clip_range", "overlong_buffer_len", "overlong_penalty_factor", "stop_properly_penalty_coef")
"""Settings that change rewards on their way to the loss."""


class Scoring(Section):
    """Reward functions and reward servers."""

    functions: dict[str, float] = Field(
        default_factory=lambda: {"math": 1.0},
        description=f"Built-in reward functions and their weights: {quoted(REWARD_FUNCTIONS)}; names "
        "without weights (`math format`) have weight 1. By default `math`; "
        "with another reward source, and for `serve-rm`, none.",
    )
    remote_url: str | tuple[Text, ...] | None = None
    """Your own reward: `path/to/file.py:function` (by default `reward_func`, as in OpenRLHF), which takes one
    response, or a batch like TRL's and OpenRLHF's functions; or the `http://` or `https://` URL of a reward server
    (`vlmrl serve-rm`). Several URLs, separated by commas, are servers of the same reward that share the work; one that
    is down is skipped."""
    remote_weight: float = 1.0
    """Weight of your own reward."""
    remote_timeout_s: PositiveFloat = 60.0
    """Time limit of one request to a reward server, after which it is sent again."""
    remote_retries: Annotated[int, Field(ge=0)] = 4
    """Retries of a request, with growing pauses, before its responses count as failed."""
    remote_batch_size: PositiveInt = 64
    """Maximum number of responses in one request."""
    remote_images: Literal["none", "data", "hash"] = "none"
    """Form in which a reward server gets the images: not at all, as the model saw them (`data`), or as hashes of their
    content."""
    time_limit_s: PositiveFloat = 10.0
    """Time limit of a reward function per response. A function that exceeds it is stopped and called once more, alone
    in a fresh process; if it exceeds it again, the response counts as failed. The limit of a batch is the sum over its
    responses."""
    num_workers: PositiveInt = 1
    """Processes that score responses."""
    pass_env: tuple[Text, ...] = ()
    """Environment variables with tokens or keys that your own reward function needs, such as OPENAI_API_KEY. Other
    variables with names of secrets are hidden from reward functions."""
    max_failed_fraction: Fraction = 0.1
    """The run stops when the infrastructure (servers, network, machine) fails for more than this fraction of a step's
    responses. Failures that a response causes are counted, and stop the run only if `remote_url` scores no response at
    all. 1: neither stops the run."""

    @field_validator("functions", mode="before")
    @classmethod
    def weigh_names(cls, given: Any) -> Any:
        """Give weight 1 to names without weights: `math`, `math,format` or a list."""
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
                    "set your own with reward.remote_url path/to/file.py:function"
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
        if len(urls) == 1 and (is_function_spec(urls[0]) or urls[0].startswith(_SCHEMES)):
            return urls[0]
        if len(urls) > 1 and all(url.startswith(_SCHEMES) for url in urls):
            return tuple(urls)
        raise ValueError(
            "your own reward is one path/to/file.py:function, or one or several URLs of servers, http://host:port"
        )

    @property
    def user_function(self) -> str | None:
        """The `path/to/file.py:function` of `remote_url`, or None."""
        return None if self.remote_url is None or self.servers else str(self.remote_url)

    @property
    def servers(self) -> tuple[str, ...]:
        """The server URLs of `remote_url`."""
        urls = (self.remote_url,) if isinstance(self.remote_url, str) else self.remote_url or ()
        return tuple(url for url in urls if url.startswith(_SCHEMES))

    @property
    def has_user_source(self) -> bool:
        """Another source than the built-in functions scores responses."""
        return self.remote_url is not None

    @model_validator(mode="after")
    def drop_default_functions(self) -> Self:
        """Drop the default functions if the user gives another source and no functions."""
        if self.has_user_source and "functions" not in self.model_fields_set:
            # The section is frozen, and this validator is still constructing it.
            self.__dict__["functions"] = {}
        return self


class Reward(Scoring):
    """All reward sources, and the shaping of rewards."""

    model_name_or_path: Text | None = None
    """Local folder or Hub id of a reward model: a sequence classifier with one label, or a model with a value head."""
    model_weight: float = 1.0
    """Weight of the reward model."""
    process_model_name_or_path: Text | None = None
    """Local folder or Hub id of a process reward model, which scores each step of a response."""
    process_weight: float = 1.0
    """Weight of the step scores, which reward the last token of a step."""
    process_separator: Annotated[str, Field(min_length=1)] = "\n\n"
    """Text that ends a step of a response; the last step ends with the response."""
    num_nodes: PositiveInt = 1
    """Machines on which the reward models run."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per machine."""
    offload: bool = False
    """Keep the weights of the reward models in CPU memory while they are idle."""
    normalize_enable: bool = False
    """Normalise the reward model's scores with the mean and standard deviation in its config.json."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Scores of responses are clipped to this range before any baseline; rewards of an environment and of steps are
    not."""
    overlong_buffer_len: PositiveInt | None = None
    """Number of tokens before `rollout.max_new_tokens` over which the soft overlong penalty rises (DAPO)."""
    overlong_penalty_factor: float = Field(default=1.0, ge=0.0)
    """Maximum of the soft overlong penalty."""
    stop_properly_penalty_coef: float | None = Field(default=None, le=1.0)
    """Penalty of truncated responses: their reward r becomes min(r, c r) for c in [0, 1], and min(r, c) for c below 0
    (ProRL), so that it never rises."""

    @property
    def has_model(self) -> bool:
        """The run has a reward model, of responses or of their steps."""
        return self.model_name_or_path is not None or self.process_model_name_or_path is not None

    @property
    def has_user_source(self) -> bool:
        return super().has_user_source or self.has_model

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
        unread |= _unread(_SERVER_SETTINGS, "reward.remote_url names no reward server")
    if not reward.functions and reward.user_function is None:
        unread |= _unread(_FUNCTION_SETTINGS, "no reward function scores responses")
    if reward.user_function is None:
        unread |= _NOT_PASSED
    if not reward.functions and reward.remote_url is None:
        unread |= _unread(("max_failed_fraction",), "no reward function or server scores responses")
    return unread


def unread_of_models(reward: Reward) -> Unread:
    unread: Unread = {}
    if reward.model_name_or_path is None:
        unread |= _unread(("model_weight", "normalize_enable"), "there is no reward.model_name_or_path")
    if reward.process_model_name_or_path is None:
        unread |= _unread(_PROCESS_SETTINGS, "there is no reward.process_model_name_or_path")
    if not reward.has_model:
        unread |= _unread(_MODEL_SETTINGS, "there is no reward model (reward.model_name_or_path)")
    return unread


def unread_of_models_in_evaluation(reward: Reward) -> Unread:
    """For verbs that sample and score responses without training."""
    unread = unread_of_models(reward)
    if not reward.has_model:
        unread |= dict.fromkeys(_SETTINGS_BESIDE_MODELS, "there is no reward model (reward.model_name_or_path)")
    return unread


def unread_of_shaping(reward: Reward, *, has_agent: bool) -> Unread:
    unread: Unread = {}
    if reward.overlong_buffer_len is None:
        unread["reward.overlong_penalty_factor"] = "there is no penalty without reward.overlong_buffer_len"
    has_functions = bool(reward.functions) and (is_given(reward, "functions") or not has_agent)
    is_scored = has_functions or reward.has_user_source
    is_punished = reward.overlong_buffer_len is not None or reward.stop_properly_penalty_coef is not None
    if not is_scored and not is_punished:
        of_environment = "rewards of an environment are not clipped: clip them in the environment"
        unread["reward.clip_range"] = of_environment if has_agent else "there is no reward, only a teacher"
    elif not rewards_vary(reward, has_agent=False):
        unread["reward.clip_range"] = "all reward sources have weight 0"
    return unread


def rewards_vary(reward: Reward, *, has_agent: bool) -> bool:
    """Whether anything rewards the responses: a source with another weight than 0, an environment, or a penalty."""
    weights = (
        *reward.functions.values(),
        0.0 if reward.remote_url is None else reward.remote_weight,
        0.0 if reward.model_name_or_path is None else reward.model_weight,
        0.0 if reward.process_model_name_or_path is None else reward.process_weight,
    )
    is_punished = reward.overlong_buffer_len is not None or reward.stop_properly_penalty_coef is not None
    return has_agent or is_punished or any(weights)


def has_source(reward: Scoring, *, has_agent: bool) -> bool:
    """Whether anything scores the responses, if only with weight 0."""
    return bool(reward.functions) or reward.has_user_source or has_agent


def conflicts_of_no_source(reward: Scoring, *, has_agent: bool = False) -> list[str]:
    if has_source(reward, has_agent=has_agent):
        return []
    return ["reward.functions is empty and reward.remote_url is not given: there is no reward"]


def conflicts_of_sampling(rollout: Rollout, reward: Reward) -> list[str]:
    conflicts = []
    if rollout.top_p < 1 and rollout.temperature != 1:
        conflicts.append(
            f"rollout.top_p {rollout.top_p:g} needs rollout.temperature 1, not {rollout.temperature:g}: "
            "below top_p 1 the engine has log-probs for temperature 1 only"
        )
    buffer = reward.overlong_buffer_len
    if buffer is not None and buffer > rollout.max_new_tokens:
        conflicts.append(
            f"reward.overlong_buffer_len {buffer} is longer than the longest response, rollout.max_new_tokens "
            f"{rollout.max_new_tokens}"
        )
    return conflicts


def conflicts_of_sources(reward: Reward) -> list[str]:
    """Conflicts between the names of sources, which are also those of their metrics."""
    function = (reward.user_function or "").rpartition(":")[2]
    models = {"model": reward.model_name_or_path, "process": reward.process_model_name_or_path}
    if models.get(function) is None:
        return []
    return [f"reward.remote_url: your function is called {function}, like the metric of the reward model: rename it"]


def unread_of_serve(reward: Reward) -> Unread:
    """For `vlmrl serve-rm`."""
    if reward.model_name_or_path is None:
        names = (
            *(f"data.{name}" for name in ("max_len", "min_pixels", "max_pixels", "max_image_pixels")),
            *_SCORER_SETTINGS,
        )
        reason = "functions are served, not a reward model"
        pass_env = _NOT_PASSED if reward.user_function is None else {}
        return dict.fromkeys((*names, "reward.normalize_enable"), reason) | pass_env
    return _unread((*_FUNCTION_SETTINGS, "pass_env"), "a reward model is served, not functions")


def conflicts_of_serve(reward: Reward) -> list[str]:
    """For `vlmrl serve-rm`."""
    if reward.servers:
        return ["reward.remote_url names another server: give the path/to/file.py:function that is to be served"]
    has_functions = reward.user_function is not None or (is_given(reward, "functions") and bool(reward.functions))
    if has_functions == (reward.model_name_or_path is not None):
        functions = "reward.remote_url path/to/file.py:function, reward.functions, or both"
        return [f"give either reward.model_name_or_path, or functions: {functions}"]
    return []


def _unread(names: tuple[str, ...], reason: str) -> Unread:
    return dict.fromkeys((f"reward.{name}" for name in names), reason)
