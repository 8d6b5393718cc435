"""Costs, workload and estimates of configured runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from transformers import AutoConfig, PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.config.names import is_given, setting_value
from vlmrl.config.plan import Plan
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import vision_trains
from vlmrl.models.configured import ConfiguredModels
from vlmrl.models.load import skeleton
from vlmrl.models.sequence import check_divisible
from vlmrl.models.sizes import num_adapter_parameters, with_value_head
from vlmrl.plan.costs import EXPERT_SETTINGS, ModelCosts, model_costs
from vlmrl.plan.placements import SEQUENCE_SIZES
from vlmrl.plan.workload import Workload, response_lengths
from vlmrl.plugins import Processor

_MOST_QUANTILES = 4096
"""Responses of a step that are told apart by length."""
Config = TypeVar("Config", bound=BaseModel)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return a copy with other values, by full names; its checks do not run again."""
    sections: dict[str, dict[str, Any]] = {}
    update: dict[str, Any] = {}
    for name, value in settings.items():
        section, dot, rest = name.partition(".")
        if dot:
            sections.setdefault(section, {})[rest] = value
        else:
            update[name] = value
    update |= {section: with_settings(getattr(config, section), inner) for section, inner in sections.items()}
    return config.model_copy(update=update)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by full names as nested mappings, as in a YAML file."""
    root: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        node = root
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = list(value) if isinstance(value, tuple) else value
    return root


def costs_of(config: RlConfig, models: ConfiguredModels, *, is_critic: bool = False) -> ModelCosts:
    """Return the costs of the actor, or of the critic.

    Raises ConfigError for a model with images that vlmrl does not read.
    """
    model: Model = config.resolved_critic.as_model if is_critic else config.actor
    size, processor = models.read(model.model_name_or_path, config)
    full = AutoConfig.from_pretrained(model.model_name_or_path, trust_remote_code=config.actor.trust_remote_code)
    vision = getattr(full, "vision_config", None)
    if vision is not None and processor.resize_factor is None:
        name = Path(model.model_name_or_path).name
        raise ConfigError(f"{name}: vlmrl has no processor for the images of models of type {full.model_type}")
    adapter = models.adapter(model, config.ds.lora, processor)
    if is_critic:
        size = with_value_head(size)
    frozen = {"vision": model.freeze_visual_encoder, "projector": model.freeze_projector, "language": False}
    trained = sum(count for part, count in size.parameters.items() if not frozen[part])
    published = size.total
    if adapter is not None:
        trained = num_adapter_parameters(size, adapter)
        published = trained if adapter.fits_engine else size.total
    depth = getattr(vision, "depth", 0)
    full_attention = getattr(vision, "fullatt_block_indexes", None)
    return model_costs(
        size,
        processor,
        {name: getattr(full.get_text_config(), name, None) for name in EXPERT_SETTINGS},
        trained=trained,
        published=published,
        bytes_per_parameter=4 if config.ds.param_dtype == "fp32" else 2,
        adapts=adapter is not None,
        trains_vision=vision is not None and vision_trains(model, adapter),
        full_attention=len(full_attention) / depth if full_attention and depth else 1.0,
        merge=int(getattr(vision, "spatial_merge_size", 2)) ** 2,
    )


def heads_of(config: RlConfig) -> int:
    """Return the number of attention heads of the language model."""
    path = config.actor.model_name_or_path
    text = AutoConfig.from_pretrained(path, trust_remote_code=config.actor.trust_remote_code).get_text_config()
    return int(text.num_attention_heads)


def sequence_sizes(config: RlConfig) -> list[int]:
    """Return the values of `ds.sequence_parallel_size` that the layers of actor and critic allow."""
    critic = config.critic.model_name_or_path if config.has_critic else None
    paths = [path for path in (config.actor.model_name_or_path, critic) if path is not None]
    nets = [skeleton(path, trust_remote_code=config.actor.trust_remote_code) for path in paths]
    return [size for size in SEQUENCE_SIZES if all(_can_share(net, size) for net in nets)]


def _can_share(net: PreTrainedModel, size: int) -> bool:
    try:
        check_divisible(net, size)
    except ConfigError:
        return size == 1
    return True


def is_apart(config: RlConfig, colocation: str) -> bool:
    """Whether the settings give a role GPUs of its own: this colocation is turned off."""
    return is_given(config, colocation) and not setting_value(config, colocation)


def workload_of(config: RlConfig, plan: Plan, processor: Processor) -> Workload:
    """Return the workload of a step, from the lengths of the plan."""
    pixels = min(plan.image_pixels, config.data.max_pixels * config.data.max_images_per_prompt)
    patches, image_tokens = image_sizes(pixels, processor)
    prompt = plan.prompt_tokens or max(config.data.max_len // 2, min(config.data.max_len, image_tokens + 64))
    if prompt < image_tokens:
        name = "data.max_len" if plan.prompt_tokens is None else "plan.prompt_tokens"
        raise ConfigError(
            f"{name} {prompt} is below the {image_tokens} tokens of images of {pixels} pixels: raise it, or lower "
            "plan.image_pixels"
        )
    longest = config.rollout.max_new_tokens
    count = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    lengths = response_lengths(
        min(count, _MOST_QUANTILES),
        mean=plan.response_tokens or max(1, longest // 2),
        longest=longest,
        sigma=plan.length_sigma,
    )
    return Workload(config.rollout.batch_size, config.rollout.n_samples_per_prompt, prompt, lengths, patches)


def image_sizes(pixels: int, processor: Processor) -> tuple[int, int]:
    """Return patches and tokens of a square image of about this many pixels; 0 for a model without images."""
    if processor.resize_factor is None or not pixels:
        return 0, 0
    side = max(1, round(math.sqrt(pixels) / processor.resize_factor)) * processor.resize_factor
    return math.prod(processor.grid((side, side))), processor.num_tokens((side, side))
