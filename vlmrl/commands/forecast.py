"""Describe a run before it starts, in lines for users: steps, trained parts, memory, rows and rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vlmrl.config.actor import Model
from vlmrl.config.critic import Critic
from vlmrl.config.num_steps import last_step, optimizer_steps
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ClusterError, RewardError
from vlmrl.models.adapter_plan import plan_adapter
from vlmrl.plugins import Processor
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.types import Group, Prompt, Rollout, Sample, Score

if TYPE_CHECKING:
    from vlmrl.commands.memory import Machine

_SHOWN_CHARS = 400
"""Longest text of what is learned of a row."""


def format_steps(config: TrainingConfig, num_rows: int) -> str:
    """Steps of the run, with the samples and optimizer updates of each.

    Raises:
        ConfigError: the data do not fill one step, or `critic.freezing_steps` leaves no step to the policy.
    """
    frozen = max(0, config.critic.freezing_steps) if isinstance(config, RlConfig) and config.has_critic else 0
    steps, updates = last_step(config, num_rows), optimizer_steps(config, num_rows, frozen=frozen)
    if not isinstance(config, RlConfig):
        return f"plan: {_counted(steps, 'step')} of {config.train.batch_size} samples; {_passes(config, num_rows)}"
    prompts, n = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    updates_per_step = updates // (steps - frozen)
    bound = "at most " if config.algo.dynamic_filtering_enable else ""
    cut = f", cut at train.max_steps {steps}" if config.train.max_steps == steps else ""
    queue = config.train.queue_size
    ahead = f"; engines sample up to {_counted(queue, 'step')} ahead" if queue else ""
    return (
        f"plan: {bound}{_counted(steps, 'step')} of {prompts} prompts x {n} responses = {prompts * n} samples, "
        f"{_counted(updates_per_step, 'update')} each of {config.train.batch_size} samples; "
        f"{_passes(config, num_rows)}{cut}{ahead}"
    )


def format_groups(config: TrainingConfig | EvalConfig) -> list[str]:
    """Warn in one line per model whose ranks share tokens across machines; nothing otherwise."""
    size = config.ds.sequence_parallel_size
    ranks: dict[str, Model | Critic] = {} if isinstance(config, EvalConfig) else {"actor": config.actor}
    if isinstance(config, RlConfig) and config.has_critic and not config.critic_is_with_actor:
        ranks["critic"] = config.resolved_critic
    flag = f"ds.sequence_parallel_size {size}"
    return [
        f"warning: {role}.num_gpus_per_node {model.num_gpus_per_node} is no multiple of {flag}: ranks on two machines "
        "exchange the tokens of every layer over the network, which is slow: use a multiple"
        for role, model in ranks.items()
        if model.num_nodes > 1 and model.num_gpus_per_node % size
    ]


def _passes(config: TrainingConfig, num_rows: int) -> str:
    passes = config.train.num_episodes if isinstance(config, RlConfig) else config.train.max_epochs
    if config.data.prompt_probs is not None:
        return f"{passes * num_rows} draws from {num_rows} rows, by data.prompt_probs"
    return f"{_counted(passes, 'pass', 'passes')} over {num_rows} rows"


def format_trained_parts(config: TrainingConfig, processor: Processor) -> str:
    """Parts of the model that train, and parts that are frozen.

    Raises:
        ConfigError: adapters are requested for layers that the model does not have, or that are frozen.
    """
    adapter = plan_adapter(config.actor, config.ds.lora, processor)
    model = config.actor
    frozen = {"vision": model.freeze_visual_encoder, "projector": model.freeze_projector, "language": False}
    names = {"language": "language model", "vision": "vision tower", "projector": "projector"}
    parts = names if processor.resize_factor is not None else {"language": names["language"]}
    trained = [n for part, n in parts.items() if (part in adapter.groups if adapter else not frozen[part])]
    others = [name for name in parts.values() if name not in trained]
    line = f"adapters of rank {adapter.rank} in {' and '.join(trained)}" if adapter else " and ".join(trained)
    return f"trains: {line}" + (f"; frozen: {' and '.join(others)}" if others else "")


def format_memory(config: TrainingConfig, machine: Machine | None = None) -> list[str]:
    """Estimated memory of the roles, with a warning where it exceeds that of the machine, by default this one."""
    # Here: it takes seconds to import, and a run does not need it.
    from vlmrl.commands.memory import GIB, memory_plan, this_machine

    plan = memory_plan(config, machine or this_machine())
    shares = ", ".join(f"{s.name} about {s.needed / GIB:.1f} of {s.available / GIB:.1f} GiB" for s in plan.shares)
    lines = [f"memory (vlmrl doctor --config shows it by role): {shares}"]
    try:
        plan.check()
    except ClusterError as error:
        lines.append(f"warning: memory: {error}")
    return lines


def format_rows(num_rows: int, dropped: Mapping[str, int], prompts: Sequence[Prompt], *, max_len: int) -> str:
    """Dropped rows among those that were read, with the reasons, and the longest prompt of the others.

    `dropped`: reason -> number of rows.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    num_read = min(num_rows, len(prompts) + sum(dropped.values()))
    reasons = ", ".join(f"{count} {kind}" for kind, count in dropped.items())
    losses = f"{sum(dropped.values())} are dropped ({reasons})" if dropped else "none is dropped"
    return (
        f"rows: of the first {num_read}, {losses}; the longest prompt has {longest} tokens, data.max_len is {max_len}"
    )


def format_samples(samples: Sequence[Sample], positions: int | None, processor: Processor) -> list[str]:
    """What is learned of the first row, and the length of the longest row with its response, with a warning where the
    model has fewer positions."""
    longest = max(len(sample.tokens) for sample in samples)
    lines = [f"the longest of {len(samples)} rows with its response has {longest} tokens"]
    of_first = [sample for sample in samples if sample.group == samples[0].group]
    texts = [processor.tokenizer.decode(sample.tokens[sample.sampled].tolist()) for sample in of_first]
    lines.append(f"learned of the first row: {' | '.join(repr(_shortened(text)) for text in texts)}")
    if positions is not None and longest > positions:
        lines.append(f"warning: the model has {positions} positions, and the longest row {longest} tokens")
    return lines


def format_rewards(config: RlConfig | EvalConfig, prompt: Prompt) -> list[str]:
    """Scores of two responses to one prompt, its label and an empty one, by the reward functions of this machine.

    Raises:
        RewardError: the prompt has no label, and a reward function needs one.
        ConfigError: the user's function cannot be loaded.
    """
    reward, lines = config.reward, []
    if reward.servers:
        lines.append("rewards: a dry run does not contact reward servers")
        reward = reward.model_copy(update={"remote_url": None})
    if config.reward.has_model:
        lines.append("rewards: a dry run does not run reward models")
    if not reward.functions and reward.user_function is None:
        return lines
    texts = ["" if prompt.label is None else f"\\boxed{{{prompt.label}}}", ""]
    group = Group(prompt, tuple(_response(prompt, text) for text in dict.fromkeys(texts)))
    scores = asyncio.run(_scores(Rewarder(reward, label_key=config.data.label_key), group))
    if isinstance(scores, RewardError):
        return [*lines, f"warning: rewards on {prompt.source}: {scores}"]
    examples = [
        f"{_format_text(rollout.text)} -> {_format_score(score)}"
        for rollout, score in zip(group.rollouts, scores, strict=True)
    ]
    return [*lines, f"rewards on {prompt.source}: {'; '.join(examples)}"]


async def _scores(rewarder: Rewarder, group: Group) -> list[Score] | RewardError:
    """Return the scores of the group, or why its responses have none. Raises RewardError for a missing label."""
    async with rewarder:
        await rewarder.begin(group)
        try:
            (scores,) = await rewarder.score([group])
        except RewardError as error:
            return error
    return scores


def _response(prompt: Prompt, text: str) -> Rollout:
    """Return a rollout of this text that was not sampled: its tokens are only the prompt's."""
    zeros = np.zeros(len(prompt.tokens))
    sampled, logprobs = zeros.astype(np.bool_), zeros.astype(np.float32)
    return Rollout.of_response(prompt.tokens, sampled, logprobs, text, "stop", version=0)


def _format_text(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...") if text else "an empty response"


def _format_score(score: Score) -> str:
    if score.failed:
        return f"no score, a failure of the {score.failure}"
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    return f"{parts}, total {score.total:g}"


def _counted(count: int, singular: str, plural: str = "") -> str:
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def _shortened(text: str) -> str:
    half = _SHOWN_CHARS // 2
    return text if len(text) <= _SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}"
