"""What the settings of rewards say about each other: sources, servers, shaping, and what is served."""

from vlmrl.config.checks import Unread
from vlmrl.config.names import is_given
from vlmrl.config.reward import Reward, Scoring
from vlmrl.config.rollout import Rollout

_OF_SERVERS = ("remote_timeout_s", "remote_retries", "remote_batch_size", "remote_images")
_OF_FUNCTIONS = ("time_limit_s", "num_workers")
_NOT_PASSED = {"reward.pass_env": "reward.remote_url names no function of your own"}
_OF_MODELS = ("num_nodes", "num_gpus_per_node", "offload")
_OF_SCORER = ("train.max_tokens_per_gpu", "ds.param_dtype", "ds.attn_implementation", "ds.use_liger_kernel")
_OF_PROCESS = ("process_weight", "process_separator")


def unread_of_sources(reward: Scoring) -> Unread:
    found: Unread = {}
    if reward.remote_url is None:
        found["reward.remote_weight"] = "there is no reward.remote_url"
    if not reward.servers:
        found |= _all(_OF_SERVERS, "reward.remote_url names no reward server")
    if not reward.functions and reward.user_function is None:
        found |= _all(_OF_FUNCTIONS, "no reward function scores answers")
    if reward.user_function is None:
        found |= _NOT_PASSED
    if not reward.functions and reward.remote_url is None:
        found |= _all(("max_failed_fraction",), "a reward model scores every answer")
    return found


def unread_of_models(reward: Reward) -> Unread:
    found: Unread = {}
    if reward.model_name_or_path is None:
        found |= _all(("model_weight", "normalize_enable"), "there is no reward.model_name_or_path")
    if reward.process_model_name_or_path is None:
        found |= _all(_OF_PROCESS, "there is no reward.process_model_name_or_path")
    if not reward.has_model:
        found |= _all(_OF_MODELS, "there is no reward model (reward.model_name_or_path)")
    return found


def unread_of_shaping(reward: Reward) -> Unread:
    if reward.overlong_buffer_len is not None:
        return {}
    return {"reward.overlong_penalty_factor": "there is no penalty without reward.overlong_buffer_len"}


def conflicts_of_sampling(rollout: Rollout, reward: Reward) -> list[str]:
    found = []
    if rollout.top_p < 1 and rollout.temperature != 1:
        found.append(
            f"rollout.top_p {rollout.top_p:g} needs rollout.temperature 1, not {rollout.temperature:g}: "
            "below top_p 1 the engine knows the log-probs of the untempered model alone"
        )
    buffer = reward.overlong_buffer_len
    if buffer is not None and buffer > rollout.max_new_tokens:
        found.append(
            f"reward.overlong_buffer_len {buffer} is longer than the longest answer, rollout.max_new_tokens "
            f"{rollout.max_new_tokens}"
        )
    return found


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
