"""The settings of the verbs that serve a model or rewards over HTTP."""

from typing import ClassVar

from vlmrl.config import reward
from vlmrl.config.actor import Model
from vlmrl.config.agent import Agent
from vlmrl.config.base import Unread
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.gateway import Gateway
from vlmrl.config.names import all_but
from vlmrl.config.reward import Reward
from vlmrl.config.rollout import Rollout
from vlmrl.config.serve import Serve
from vlmrl.config.train import Loop
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import CHECKPOINT, SYNC, WITH_TRAINER
from vlmrl.config.vllm import Vllm


class PolicyServeConfig(VerbConfig):
    """Serve a model as the gateway of a run serves its policy: OpenAI's chat completions, with exact tokens.

    Clients take the address that is printed as their base URL, with any key: each key is a conversation of its own.
    Beyond loopback (`gateway.host`), keys are the token in the environment variable VLMRL_GATEWAY_TOKEN, or begin with
    it and a slash.
    """

    verb: ClassVar[str] = "serve"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *CHECKPOINT)
        | all_but(Agent, "agent", "context_len", "max_images", "tool_format")
        | all_but(
            *(Columns, "data", "system_prompt", "min_pixels", "max_pixels"),
            *("max_image_pixels", "max_row_pixels", "max_image_mib"),
        )
        | all_but(Rollout, "rollout", "max_new_tokens", "temperature", "top_p")
        | frozenset(
            f"vllm.{name}" for name in (*SYNC, *WITH_TRAINER, "qlora_base", "num_engines", "generate_timeout_s")
        )
        | all_but(Loop, "train", "seed")
        | all_but(Ds, "ds", "param_dtype")
    )

    actor: Model
    agent: Agent = Agent()
    gateway: Gateway = Gateway()
    data: Columns = Columns()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    train: Loop = Loop()
    ds: Ds = Ds()

    def conflicts(self) -> list[str]:
        if self.rollout.max_new_tokens < self.agent.context_len:
            return []
        conflict = (
            f"agent.context_len {self.agent.context_len} leaves no room for a prompt before a response of "
            f"rollout.max_new_tokens {self.rollout.max_new_tokens}: raise it, or lower the other"
        )
        return [conflict]


class ServeConfig(VerbConfig):
    """Reward server: score responses over HTTP, with a reward model or with functions."""

    verb: ClassVar[str] = "serve-rm"
    omits: ClassVar[frozenset[str]] = (
        all_but(
            *(Reward, "reward", "model_name_or_path", "normalize_enable"),
            *("functions", "remote_url", "time_limit_s", "num_workers", "pass_env"),
        )
        | all_but(Columns, "data", "max_len", "min_pixels", "max_pixels", "max_image_pixels")
        | all_but(Loop, "train", "max_tokens_per_gpu")
        | all_but(Ds, "ds", "param_dtype", "attn_implementation", "use_liger_kernel")
    )

    serve: Serve = Serve()
    reward: Reward = Reward()
    data: Columns = Columns()
    train: Loop = Loop()
    ds: Ds = Ds()

    def unread(self) -> Unread:
        return reward.unread_of_serve(self.reward)

    def conflicts(self) -> list[str]:
        return [*reward.conflicts_of_no_source(self.reward), *reward.conflicts_of_serve(self.reward)]
