"""Images in Ray's object store: written once per node, read in place, and passed around as small handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import ray

from vlmrl.agents.settings import EnvironmentSettings
from vlmrl.config.bench_verbs import RolloutBench
from vlmrl.config.data import Columns
from vlmrl.config.pairs import PairData
from vlmrl.config.rollout import HeldOut
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.data.columns import NO_REQUIREMENTS, RowRequirements
from vlmrl.data.judgements import judgement_problems
from vlmrl.data.media import InlineMedia
from vlmrl.data.source import Source
from vlmrl.data.targets import Targets
from vlmrl.rewards.label_check import LabelCheck, functions_that_need_labels, label_substitutes, other_columns
from vlmrl.types import ChatMessage, Group, Media, Pixels, Prompt, Rollout
from vlmrl.video_size import Size


@dataclass(frozen=True, slots=True)
class StoredMedia:
    """A handle to pixels in the object store. Pickling it copies the reference, not the pixels."""

    hash: str
    size: Size
    ref: ray.ObjectRef[Pixels]

    def fetch(self) -> Pixels:
        pixels: Pixels = ray.get(self.ref, timeout=600)
        return pixels


def put(media: InlineMedia) -> StoredMedia:
    """Copy the pixels into this node's object store."""
    return StoredMedia(hash=media.hash, size=media.size, ref=ray.put(media.pixels))


def keep_media(group: Group, prompt: Prompt) -> Group:
    """Return the group with handles of images that outlive the engine that responded to the `prompt`.

    Ray loses an object with the process that wrote it. Images of the prompt are the data's; those of an environment are
    the engine's, and this process copies them. Raises Ray's errors if the engine has died: they are lost then.
    """
    kept: dict[str, Media] = {media.hash: media for media in prompt.media}

    def keep(media: Media) -> Media:
        if media.hash not in kept:
            kept[media.hash] = StoredMedia(media.hash, media.size, ray.put(media.fetch()))
        return kept[media.hash]

    def keep_all(media: Sequence[Media]) -> tuple[Media, ...]:
        return tuple(map(keep, media))

    def in_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        return tuple(
            replace(message, parts=tuple(part if isinstance(part, str) else keep(part) for part in message.parts))
            for message in messages
        )

    def in_rollout(rollout: Rollout) -> Rollout:
        segments = tuple(replace(segment, media=keep_all(segment.media)) for segment in rollout.segments)
        episode = rollout.episode
        if episode is not None:
            episode = replace(episode, messages=in_messages(episode.messages))
        return replace(rollout, segments=segments, episode=episode)

    first = replace(group.prompt, media=keep_all(group.prompt.media), messages=in_messages(group.prompt.messages))
    return Group(first, tuple(map(in_rollout, group.rollouts)))


def created_bytes() -> int:
    """Return the bytes written so far to all object stores of the session."""
    from ray._private.internal_api import node_stats

    alive = [node for node in ray.nodes() if node["Alive"]]
    stats = [
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False) for node in alive
    ]
    return sum(int(stat.store_stats.cumulative_created_bytes) for stat in stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Settings of the run's `Source`, which puts pixels into the object store."""

    model: str
    """Folder or Hub id whose processor reads the data."""
    trust_remote_code: bool
    data: Columns
    evaluation: HeldOut | None
    seed: int
    functions: Sequence[str] = ()
    """Built-in reward functions of the run: rows whose labels they cannot use are dropped."""
    requirements: RowRequirements = NO_REQUIREMENTS
    epochs: int | None = None
    """How often each training row is read; None: as often as rows are drawn."""
    environments: EnvironmentSettings | None = None
    """Environments whose tools the prompts show, and whose conversations begin with them."""

    def build(self, *, share: Callable[[InlineMedia], Media] = put, label_check: LabelCheck | None = None) -> Source:
        """Make the source. `label_check`: of `functions`; None: a new one, whose process ends with this one."""
        check = judgement_problems if self.requirements.judged else label_check or LabelCheck(self.functions)
        return Source(
            model=self.model,
            trust_remote_code=self.trust_remote_code,
            data=self.data,
            evaluation=self.evaluation,
            seed=self.seed,
            share=share,
            label_problems=check,
            requirements=self.requirements,
            tools=() if self.environments is None else self.environments.list_tools(),
            agent_max_images=None if self.environments is None else self.environments.agent.max_images,
            epochs=self.epochs,
        )


def row_requirements(config: TrainingConfig | EvalConfig | RolloutBench) -> RowRequirements:
    """Columns that the run needs in each row, in addition to the prompt."""
    if isinstance(config, RolloutBench):
        return NO_REQUIREMENTS
    if isinstance(config, RmConfig) and config.rm.kind == "process":
        separator = config.rm.process_separator
        return RowRequirements(answer=True, label_for="rm.kind process", step_separator=separator)
    if isinstance(config, DpoConfig) and not config.dpo.is_paired:
        return RowRequirements(answer=True, judged=True, label_for="dpo.loss kto")
    if isinstance(config.data, PairData):
        return RowRequirements(pair=True)
    if isinstance(config, SftConfig):
        return sft_requirements(config)
    if not isinstance(config, RlConfig | EvalConfig):
        return RowRequirements(answer=True)
    reward = config.reward
    return RowRequirements(
        label_for=functions_that_need_labels(reward),
        label_substitutes=label_substitutes(reward),
        reward_columns=other_columns(reward),
    )


def sft_requirements(config: SftConfig) -> RowRequirements:
    """What supervised fine-tuning needs in each row, and learns of it."""
    if config.sft.pretrain_mode:
        return RowRequirements(targets=Targets("text", config.data.truncate_enable))
    kind: Literal["last", "all"] = "all" if config.data.multiturn else "last"
    return RowRequirements(answer=True, targets=Targets(kind, config.data.truncate_enable))
