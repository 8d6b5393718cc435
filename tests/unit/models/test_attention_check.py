"""Models whose attention ignores where packed samples begin are found in their first pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vlmrl.data.packing import collect, make_pack
from vlmrl.errors import ConfigError
from vlmrl.models.attention import PACKED
from vlmrl.models.inputs import model_inputs
from vlmrl.models.scorer import Scorer
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Layout, Sample

SAMPLES = [Sample(tokens=np.arange(n) + 65, sampled=np.arange(n) > 0) for n in (6, 9)]
SIZES = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
MLA = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}


@torch.no_grad()
def model(family: str, attention: str, **sizes: int) -> PreTrainedModel:
    """A model whose attention is far from even, so that a leak is large."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | sizes)
    net: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in net.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8)
    return net


@torch.no_grad()
def score(net: PreTrainedModel, processor: Processor, samples: list[Sample], layout: Layout) -> list[Floats]:
    pack = make_pack(samples, range(len(samples)), layout)
    return list(collect(pack, Scorer(net)(model_inputs(net, processor, pack)).logprobs))


@pytest.mark.parametrize("attention", [PACKED, "sdpa"])
@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3", {}), ("gpt2", {}), ("phi3", {}), ("olmo2", {}), ("deepseek_v3", MLA)]
)
def test_packed_samples_score_as_each_alone(
    family: str, sizes: dict[str, int], attention: str, reader: Callable[..., Any]
) -> None:
    """DeepSeek's values are narrower than its keys."""
    net = model(family, attention, **sizes)
    alone = [values for sample in SAMPLES for values in score(net, reader("qwen3"), [sample], "padded")]
    for values, expected in zip(score(net, reader("qwen3"), SAMPLES, "packed"), alone, strict=True):
        np.testing.assert_allclose(values, expected, atol=2e-5)


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_a_plan_that_does_not_reach_the_layers_is_found(family: str, reader: Callable[..., Any]) -> None:
    net = model(family, PACKED)
    score(net, reader("qwen3"), SAMPLES, "padded")
    with pytest.raises(ConfigError, match=f"2 of the 2 layers of {type(net).__name__} attend by code of their own"):
        score(net, reader("qwen3"), SAMPLES, "packed")
    score(model(family, "sdpa"), reader("qwen3"), SAMPLES, "packed")


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_attention_by_code_of_its_own_is_found(layout: Layout, reader: Callable[..., Any]) -> None:
    """BLOOM asks for a mask and gets none: it would attend to later tokens."""
    with pytest.raises(ConfigError, match="2 of the 2 layers of BloomForCausalLM attend by code of their own"):
        score(model("bloom", PACKED), reader("qwen3"), SAMPLES, layout)
    score(model("bloom", "eager"), reader("qwen3"), SAMPLES, "padded")


@pytest.mark.parametrize("family", ["opt", "falcon", "afmoe"])
def test_a_mask_that_ignores_positions_is_found(family: str, reader: Callable[..., Any]) -> None:
    net = model(family, "sdpa")
    score(net, reader("qwen3"), SAMPLES, "padded")
    with pytest.raises(ConfigError, match=f"mask of {type(net).__name__} lets packed samples attend to each other"):
        score(net, reader("qwen3"), SAMPLES, "packed")
