"""A small model of vLLM's own layers, as a worker of one or two holds it, and weight updates of it, in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.conv import Conv3dLayer
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vlmrl.rollout.readback import Places, Readback
from vlmrl.rollout.reports import Report
from vlmrl.rollout.worker_extension import WeightUpdate, tied_heads

WIDTH, HEADS, KV_HEADS, INNER, VOCAB, TAPS = 32, 4, 4, 48, 100, 4
"""Equal numbers of key and query heads, so that their weights can be swapped."""
CHANNELS = (WIDTH, WIDTH, 2 * WIDTH)
"""Queries, keys and values of the convolution. vLLM's kernel takes multiples of 32 in each of two workers."""
STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv_proj = QKVParallelLinear(WIDTH, WIDTH // HEADS, HEADS, KV_HEADS, bias=True)
        self.o_proj = RowParallelLinear(WIDTH, WIDTH, bias=False)
        self.gate_up_proj = MergedColumnParallelLinear(WIDTH, [INNER] * 2, bias=False)
        self.down_proj = RowParallelLinear(INNER, WIDTH, bias=False)


def _convolution() -> ColumnParallelLinear:
    """The short convolution of linear attention, over queries, keys and values, as vLLM makes it."""
    layer = ColumnParallelLinear(TAPS, sum(CHANNELS), bias=False)
    layer.weight.data = layer.weight.data.unsqueeze(1)
    # Replaced, as in vLLM's layer: the parameter's own loader does not know the three parts.
    parts = [(size, 0, False) for size in CHANNELS]
    loader = mamba_v2_sharded_weight_loader(parts, layer.tp_size, layer.tp_rank)
    layer.weight.weight_loader = loader
    return layer


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tower = Conv3dLayer(3, WIDTH, kernel_size=(2, 2, 2), stride=(2, 2, 2), bias=False)
        self.conv1d = _convolution()
        self.embed_tokens = VocabParallelEmbedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = ParallelLMHead(VOCAB, WIDTH)
        if tied:
            self.lm_head = self.lm_head.tie_weights(self.embed_tokens)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters(remove_duplicate=False))
        loaded = set()
        for name, tensor in weights:
            part = next((part for part in STACKED if f".{part}." in name), None)
            fused, shard = STACKED[part] if part else (None, None)
            place = name.replace(part, fused) if part and fused else name
            parameter = parameters[place]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, shard) if part else loader(parameter, tensor)
            loaded.add(place)
        return loaded


def weights(*, tied: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """New random weights with each call, under the checkpoint's names."""

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape) * 0.05).to(dtype)

    named = {"tower.weight": random(WIDTH, 3, 2, 2, 2), "embed_tokens.weight": random(VOCAB, WIDTH)}
    named["conv1d.weight"] = random(sum(CHANNELS), 1, TAPS)
    for n in range(2):
        layer = f"layers.{n}"
        named |= {f"{layer}.norm.weight": random(WIDTH), f"{layer}.norm.bias": random(WIDTH)}
        for name in ("q", "k", "v"):
            named |= {f"{layer}.{name}_proj.weight": random(WIDTH, WIDTH), f"{layer}.{name}_proj.bias": random(WIDTH)}
        named |= {f"{layer}.o_proj.weight": random(WIDTH, WIDTH), f"{layer}.down_proj.weight": random(WIDTH, INNER)}
        named |= {f"{layer}.{name}_proj.weight": random(INNER, WIDTH) for name in ("gate", "up")}
    return named if tied else named | {"lm_head.weight": random(VOCAB, WIDTH)}


@cache
def _config() -> VllmConfig:
    return VllmConfig()


class Worker:
    """One worker of `size`, with the model as vLLM's loader leaves it."""

    def __init__(self, *, tied: bool, dtype: torch.dtype, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self.tied, self.dtype = rank, size, tied, dtype
        self.config: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
        self.pieces: Places = {}
        self.places: dict[str, frozenset[str]] = {}
        with self.as_worker():
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                self.model = Model(tied=tied).requires_grad_(False)
            finally:
                torch.set_default_dtype(before)
            record_metadata_for_reloading(self.model)
            self.model.load_weights(weights(tied=tied, dtype=dtype).items())
            for module in self.model.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)

    @contextmanager
    def as_worker(self) -> Iterator[None]:
        """Context in which vLLM's layers see this rank and size."""
        modules = ("layers.linear", "layers.vocab_parallel_embedding", "parameter")
        with ExitStack() as stack, set_current_vllm_config(_config()):
            for module in modules:
                for field, value in (("rank", self.rank), ("world_size", self.size)):
                    name = f"vllm.model_executor.{module}.get_tensor_model_parallel_{field}"
                    stack.enter_context(mock.patch(name, return_value=value))
            yield

    def sync(
        self, sent: dict[str, Tensor], *, seed: int, full: bool = True, kind: type[WeightUpdate] = WeightUpdate
    ) -> Report:
        with self.as_worker():
            readback = Readback(self.model, {"seed": seed, "is_full": full}, self.pieces, tied_heads(self.model))
            update = kind(self.model, self.config, self.places, readback)
            update.load(sent.items())
            return update.complete()
