"""Random samples for benchmarks, tokens and pixels, in the shapes that the settings give."""

from __future__ import annotations

import numpy as np

from vlmrl.config.bench import SyntheticBatch
from vlmrl.config.data import Columns
from vlmrl.data.experience import Experience
from vlmrl.data.media import InlineMedia
from vlmrl.errors import ConfigError
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Ints, Sample


def make_samples(processor: Processor, vocabulary: int, sizes: SyntheticBatch, *, seed: int) -> list[Sample]:
    """Make G responses to each prompt, group by group. A prompt has its images first, then text.

    Raises ConfigError when the images do not fit into the prompt, or the model takes no images.
    """
    rng = np.random.default_rng(seed)
    text_tokens = np.setdiff1d(np.arange(vocabulary), processor.banned_tokens)
    lengths = sizes.response_tokens
    samples: list[Sample] = []
    for group in range(sizes.groups):
        media = _images(processor, sizes, rng, group) if sizes.image_size else ()
        image_tokens = _image_tokens(processor, media)
        if len(image_tokens) >= sizes.prompt_tokens:
            raise ConfigError(
                f"bench.prompt_tokens {sizes.prompt_tokens} leaves no room for text after the {len(image_tokens)} "
                f"tokens of {len(media)} images of bench.image_size {sizes.image_size}: raise it"
            )
        prompt = np.concatenate([image_tokens, rng.choice(text_tokens, sizes.prompt_tokens - len(image_tokens))])
        for _ in range(sizes.n_samples_per_prompt):
            response = rng.choice(text_tokens, lengths[len(samples) % len(lengths)])
            tokens = np.concatenate([prompt, response])
            sampled = np.arange(len(tokens)) >= len(prompt)
            samples.append(Sample(tokens=tokens, sampled=sampled, media=media, group=group, source=f"bench:{group}"))
    return samples


def random_experience(samples: list[Sample], old_logprobs: list[Floats], *, seed: int) -> Experience:
    """Give the samples random advantages; rollout and old log-probs are both `old_logprobs`."""
    rng = np.random.default_rng(seed)
    advantages = [(rng.standard_normal() * sample.sampled).astype(np.float32) for sample in samples]
    return Experience(samples=samples, advantages=advantages, old_logprobs=old_logprobs, rollout_logprobs=old_logprobs)


def _images(
    processor: Processor, sizes: SyntheticBatch, rng: np.random.Generator, group: int
) -> tuple[InlineMedia, ...]:
    factor = processor.resize_factor
    if factor is None:
        raise ConfigError(f"bench.image_size {sizes.image_size}: the model takes no images, leave it out")
    side = max(1, round(sizes.image_size / factor)) * factor
    width, height = processor.target_size((side, side))
    return tuple(
        InlineMedia(f"bench:{group}:{i}", (width, height), rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for i in range(sizes.images_per_prompt)
    )


def _image_tokens(processor: Processor, media: tuple[InlineMedia, ...]) -> Ints:
    if not media:
        return np.zeros(0, dtype=np.int64)
    text = processor.render("<image>" * len(media), num_images=len(media), columns=Columns(apply_chat_template=False))
    return processor.encode(text, [item.size for item in media])[0]
