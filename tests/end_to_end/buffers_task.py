"""Tasks of learning_rank.py: buffers of models, and log-probs of distant tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_TOKENS = 2048
SIDE = 140
"""Size of the image in pixels."""


def sharpened(model: Path, out: Path) -> str:
    """Copy a model and sharpen its attention, so that positions of tokens matter."""
    import shutil

    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, out)
    weights = load_file(model / "model.safetensors")
    weights = {n: w * 4 if any(part in n for part in ("q_proj", "k_proj", "qkv")) else w for n, w in weights.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


def buffers(net: Any) -> dict[str, np.ndarray]:
    """Return all floating-point buffers by `type name`, in fp32, which holds bf16 exactly."""
    return {f"{b.dtype} {name}": b.float().numpy() for name, b in net.named_buffers() if b.is_floating_point()}


def far(out: Path, *, model: str, **settings: Any) -> None:
    """Save buffers of a policy, and its log-probs of 2,048 tokens after an image."""
    from learning_rank import PACKED, packs_of, policy

    from vlmrl.config.data import Columns
    from vlmrl.data.media import InlineMedia
    from vlmrl.types import Sample

    learner = policy(model, **settings)
    rng, tools = np.random.default_rng(0), learner._processor
    media = (InlineMedia("far", (SIDE, SIDE), rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)),)
    prompt, _ = tools.encode(tools.render("what is this?", num_images=1, columns=Columns()), [(SIDE, SIDE)])
    tokens = np.concatenate([prompt, rng.integers(97, 122, NUM_TOKENS)]).astype(np.int64)
    row = Sample(tokens, np.arange(len(tokens)) >= len(prompt), media, 0, "test:far")
    ((_, logprobs),) = learner.logprobs(packs_of(learner, [row], **PACKED))[0]
    np.savez(out.with_suffix(".npz"), logprobs=logprobs, **buffers(learner._net))


def built(out: Path, *, models: dict[str, str], stage: int) -> None:
    """Save buffers of models in bf16: loaded as a policy, and with a value head."""
    from vlmrl.config.ds import Ds
    from vlmrl.learning.deepspeed_engine import sharded_loading
    from vlmrl.models.load import load_model
    from vlmrl.models.value_head import value_net

    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    arrays: dict[str, np.ndarray] = {}
    for family, model in models.items():
        with sharded_loading(Ds(zero_stage=stage, param_dtype="bf16")):  # type: ignore[arg-type]
            nets = {"policy": load_model(model, **options), "critic": value_net(model, head_seed=0, **options)}
        for kind, net in nets.items():
            arrays |= {f"{family} {kind} {name}": value for name, value in buffers(net).items()}
    np.savez(out.with_suffix(".npz"), **arrays)
