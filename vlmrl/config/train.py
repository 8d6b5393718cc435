"""The training loop."""

from typing import Literal

from pydantic import Field, field_validator

from vlmrl.config.base import PositiveInt, Section, Text, Unread, is_function_spec

Layout = Literal["shared", "packed", "padded"]


class Loop(Section):
    """The loop, and settings of every run."""

    seed: int = 42
    """Seed of all random choices."""
    batch_size: PositiveInt = 128
    """Samples per optimizer step, over all ranks; for pairs of responses, pairs."""
    micro_batch_size: PositiveInt | None = None
    """Maximum number of samples in one forward pass; by default only `max_tokens_per_gpu` limits it. Responses that one
    loss compares stay in one pass: a pair counts as two samples, also where the maximum is 1."""
    max_tokens_per_gpu: PositiveInt = 16192
    """Token budget of one forward-backward pass on one rank."""
    layout: Layout = "shared"
    """`shared`: packed samples, with the prompt of a group stored once. `packed`: packed samples, each with its own
    prompt. `padded`: one row per sample, the baseline for comparisons."""
    max_epochs: PositiveInt = 1
    """Passes over the data, or in `rl` over each batch of experience."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps, even within an epoch."""
    full_determinism_enable: bool = False
    """Use PyTorch's deterministic kernels, which may be slower."""
    timeout_s: PositiveInt = 3600
    """Seconds after which a role that does not reply is an error."""
    wait_nodes_s: int = Field(default=0, ge=0)
    """Seconds to wait for machines that have not joined the cluster of RAY_ADDRESS yet, if the run does not fit on
    those that have, and before that as long for the head to answer. By default either is an error at once."""
    stop_grace_s: PositiveInt = 60
    """Time limit from a signal that stops the run (SIGTERM, SIGHUP, Ctrl-C) to its end: finishing the update, saving a
    checkpoint, ending all processes. Remaining processes are then killed."""


class SampledLoop(Loop):
    """The loop of supervised stages that may evaluate sampled responses."""

    colocate_all: bool = False
    """The model and the engines of `eval.generate_enable` share devices, which they use in turn."""


class AgentLoop(Loop):
    """The loop of verbs that sample responses."""

    agent_func_path: Text | None = None
    """Your environment: `path/to/file.py:make`, a function that makes one per episode; or your agent, `async def
    run(task)`, which reaches the policy through an OpenAI-compatible server (`gateway.*`). A file alone means its
    function `make`, or else `run`. Each response is then a conversation (`agent.*`). None: a response is one turn."""

    @field_validator("agent_func_path")
    @classmethod
    def check_agent(cls, given: str | None) -> str | None:
        spec = f"{given}:make" if given is not None and given.endswith(".py") else given
        if spec is not None and not is_function_spec(spec):
            raise ValueError(f"must be path/to/file.py or path/to/file.py:function, not {given}")
        return spec


class EvalLoop(AgentLoop):
    """The loop of verbs that sample and score responses without training."""

    colocate_all: bool = False
    """Engines and reward models share devices, and use them in turn with `vllm.enable_sleep`."""


class TrainRl(AgentLoop):
    """The loop of `vlmrl rl`."""

    num_episodes: PositiveInt = 1
    """Passes over the prompts."""
    async_enable: bool = False
    """Sample the responses of later steps while the trainer learns from earlier ones. Engines and trainer then have
    devices of their own."""
    async_queue_size: int = Field(default=1, ge=0)
    """Q: the engines run at most this many batches ahead, so no token is trained on after more than Q weight syncs. 0
    is synchronous."""
    partial_rollout_enable: bool = False
    """Responses under way go on with the new weights after a weight sync, instead of being finished before it. A
    response that is to cross two needs `train.async_queue_size` 2."""
    colocate_all: bool = False
    """All models share devices."""
    colocate_actor_ref: bool = False
    """Actor and reference share devices."""
    colocate_actor_teacher: bool = False
    """Actor and the teacher of `algo.distill` share devices."""
    colocate_actor_critic: bool = False
    """The critic lives in the actor's processes, and uses the actor's features of a frozen vision tower."""
    colocate_critic_reward: bool = False
    """Critic and reward model share devices."""
    enable_ema: bool = False
    """Keep a moving average of the actor's weights, and write it to model_ema/ in `ckpt.output_dir`, or to adapter_ema/
    with adapters."""
    ema_beta: float = Field(default=0.992, gt=0.0, lt=1.0)
    """Decay of the average per optimizer step."""
    image_check_steps: int = Field(default=0, ge=-1)
    """Steps between checks that engine and trainer see the images; the first is before the first update. A path whose
    log-probs do not depend on the images stops the run. 0: only the first check; -1: none."""

    @property
    def queue_size(self) -> int:
        """How many batches the engines run ahead; 0 if the run is synchronous."""
        return self.async_queue_size if self.async_enable else 0


def unread_of_async(train: TrainRl) -> Unread:
    if not train.async_enable:
        names = ("train.async_queue_size", "train.partial_rollout_enable")
        return dict.fromkeys(names, "train.async_enable is off")
    if not train.async_queue_size:
        return {"train.partial_rollout_enable": "train.async_queue_size 0 is synchronous: no response is under way"}
    return {}
