"""The training loop."""

from typing import Literal

from pydantic import Field

from vlmrl.config.base import PositiveInt, Section

Layout = Literal["shared", "packed", "padded"]


class Loop(Section):
    """The loop, and what every run has."""

    seed: int = 42
    """Seed of everything that is drawn at random."""
    batch_size: PositiveInt = 128
    """Samples per optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Most samples in one forward pass; by default only `max_tokens_per_gpu` bounds it."""
    max_tokens_per_gpu: PositiveInt = 16192
    """Token budget of one forward-backward pass on one rank."""
    layout: Layout = "shared"
    """`shared`: samples end to end, the prompt of a group once. `packed`: each sample with its own copy of the prompt.
    `padded`: one row per sample, the yardstick."""
    max_epochs: PositiveInt = 1
    """Passes over the data (sft), or over each batch of experience (rl)."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps, whatever the epochs say."""
    full_determinism_enable: bool = False
    """Ask PyTorch for deterministic kernels, at some cost in speed."""
    timeout_s: PositiveInt = 3600
    """A role that does not answer for so many seconds is an error."""
    stop_grace_s: PositiveInt = 60
    """Seconds from a signal that stops the run (SIGTERM, SIGHUP, Ctrl-C) to its end: finishing the update, saving a
    checkpoint, ending every process. What is left then is killed."""


class TrainRl(Loop):
    """The loop of `vlmrl rl`."""

    num_episodes: PositiveInt = 1
    """Passes over the prompts."""
    colocate_all: bool = False
    """All models share the same devices."""
    colocate_actor_ref: bool = False
    """Actor and reference share the same devices."""
    colocate_actor_critic: bool = False
    """The critic lives in the actor's processes, and has the features of a frozen vision tower from it."""
    colocate_critic_reward: bool = False
    """Critic and reward model share the same devices."""
    enable_ema: bool = False
    """Keep a moving average of the actor's weights, and write it too: model_ema/ in `ckpt.output_dir`, or adapter_ema/
    with adapters."""
    ema_beta: float = Field(default=0.992, gt=0.0, lt=1.0)
    """How much of the average stays at each optimizer step."""
    image_check_steps: int = Field(default=0, ge=-1)
    """Make sure, before the first update and before every so many steps' one, that engine and trainer see the images: a
    path whose log-probs do not follow them stops the run. 0 means before the first update only; -1 means never."""
