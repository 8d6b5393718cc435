"""What a run will do, as lines for people, before any of it is started: steps, what trains, memory, rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.config.schedule import last_step, optimizer_steps
from vlmrl.errors import ClusterError, RewardError
from vlmrl.models.adapter_plan import plan_adapter
from vlmrl.plugins import Processor
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.types import Group, Prompt, Rollout, Sample, Score

if TYPE_CHECKING:
    from vlmrl.commands.memory import Machine


def of_steps(config: RlConfig | SftConfig, num_rows: int) -> str:
    """Steps of the run, and samples and optimizer updates of each.

    Raises:
        ConfigError: the data are not enough for one step, or the critic has all steps for itself.
    """
    frozen = max(0, config.critic.freezing_steps) if isinstance(config, RlConfig) and config.has_critic else 0
    steps, updates = last_step(config, num_rows), optimizer_steps(config, num_rows, frozen=frozen)
    if isinstance(config, SftConfig):
        passes = _counted(config.train.max_epochs, "pass", "passes")
        return f"plan: {_counted(steps, 'step')} of {config.train.batch_size} samples; {passes} over {num_rows} rows"
    prompts, n = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    each = updates // (steps - frozen)
    passes = _counted(config.train.num_episodes, "pass", "passes")
    about = "at most " if config.algo.dynamic_filtering_enable else ""
    cut = f", cut at train.max_steps {steps}" if config.train.max_steps == steps else ""
    return (
        f"plan: {about}{_counted(steps, 'step')} of {prompts} prompts x {n} responses = {prompts * n} samples, "
        f"{_counted(each, 'update')} each of {config.train.batch_size} samples; {passes} over {num_rows} rows{cut}"
    )


def of_training(config: RlConfig | SftConfig, tools: Processor) -> str:
    """Which parts of the model train, and which stay as they are.

    Raises:
        ConfigError: adapters are asked for in layers that the model does not have, or that are frozen.
    """
    adapter = plan_adapter(config.actor, config.ds.lora, tools)
    model = config.actor
    frozen = {"vision": model.freeze_visual_encoder, "projector": model.freeze_projector, "language": False}
    names = {"language": "language model", "vision": "vision tower", "projector": "projector"}
    parts = names if tools.resize_factor is not None else {"language": names["language"]}
    trains = [n for part, n in parts.items() if (part in adapter.groups if adapter else not frozen[part])]
    stays = [name for name in parts.values() if name not in trains]
    what = f"adapters of rank {adapter.rank} in {' and '.join(trains)}" if adapter else " and ".join(trains)
    return f"trains: {what}" + (f"; stays as it is: {' and '.join(stays)}" if stays else "")


def of_memory(config: RlConfig | SftConfig, machine: Machine | None = None) -> list[str]:
    """What the roles take of each memory, estimated, on this machine or another; where that is too much, a warning."""
    # It takes seconds to import, which a run has no use for.
    from vlmrl.commands.memory import GIB, memory_plan, this_machine

    plan = memory_plan(config, machine or this_machine())
    told = ", ".join(f"{s.name} about {s.needed / GIB:.1f} of {s.available / GIB:.1f} GiB" for s in plan.shares)
    lines = [f"memory (vlmrl doctor --config shows it by role): {told}"]
    try:
        plan.check()
    except ClusterError as error:
        lines.append(f"warning: memory: {error}")
    return lines


def of_rows(num_rows: int, dropped: Mapping[str, int], prompts: Sequence[Prompt], *, max_len: int) -> str:
    """How many of the first rows are dropped, and why, and how much of the room the longest prompt that is left takes.

    `prompts` are those that were made of them; `dropped` is why rows were not -> how many.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    looked_at = min(num_rows, len(prompts) + sum(dropped.values()))
    reasons = ", ".join(f"{count} {kind}" for kind, count in dropped.items())
    told = f"{sum(dropped.values())} are dropped ({reasons})" if dropped else "none is dropped"
    room = f"the longest prompt has {longest} tokens, data.max_len is {max_len}"
    return f"rows: of the first {looked_at}, {told}; {room}"


def of_samples(samples: Sequence[Sample], positions: int | None) -> list[str]:
    """How long rows are with their responses, of supervised training."""
    longest = max(len(sample.tokens) for sample in samples)
    lines = [f"the longest of {len(samples)} rows with its response has {longest} tokens"]
    if positions is not None and longest > positions:
        lines.append(f"warning: the model has {positions} positions, and the longest row {longest} tokens")
    return lines


def of_rewards(config: RlConfig | EvalConfig, prompt: Prompt) -> list[str]:
    """What each reward source that runs on this machine gives for two responses to one prompt: its label, and nothing.

    Raises:
        RewardError: the prompt has no label, and a reward function compares with one.
        ConfigError: the user's function cannot be loaded.
    """
    reward, lines = config.reward, []
    if reward.servers:
        lines.append("rewards: servers are not asked by a dry run")
        reward = reward.model_copy(update={"remote_url": None})
    if isinstance(config, RlConfig) and config.reward.has_model:
        lines.append("rewards: reward models are not asked by a dry run")
    if not reward.functions and reward.user_function is None:
        return lines
    texts = ["" if prompt.label is None else f"\\boxed{{{prompt.label}}}", ""]
    group = Group(prompt, tuple(_response(prompt, text) for text in dict.fromkeys(texts)))
    scores = asyncio.run(_scores(Rewarder(reward, label_key=config.data.label_key), group))
    if isinstance(scores, RewardError):
        return [*lines, f"warning: rewards on {prompt.source}: {scores}"]
    told = [f"{_shown(rollout.text)} -> {_score(score)}" for rollout, score in zip(group.rollouts, scores, strict=True)]
    return [*lines, f"rewards on {prompt.source}: {'; '.join(told)}"]


async def _scores(rewarder: Rewarder, group: Group) -> list[Score] | RewardError:
    """The scores of the group, or why its responses have none. Raises RewardError for a missing label."""
    async with rewarder:
        await rewarder.begin(group)
        try:
            (scores,) = await rewarder.score([group])
        except RewardError as error:
            return error
    return scores


def _response(prompt: Prompt, text: str) -> Rollout:
    """A response that nobody sampled."""
    nothing = np.zeros(len(prompt.tokens))
    return Rollout(
        tokens=prompt.tokens,
        sampled=nothing.astype(np.bool_),
        logprobs=nothing.astype(np.float32),
        text=text,
        finish_reason="stop",
        version=0,
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...") if text else "an empty response"


def _score(score: Score) -> str:
    if score.failed:
        return f"no score, a failure of the {score.failure}"
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    return f"{parts}, in all {score.total:g}"


def _counted(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"
