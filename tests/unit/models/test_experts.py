"""Routers are found in every layer, and experts compute in fp64 where grouped products cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vlmrl.algorithms.load_balance import load_balance_loss
from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.data.packing import Pack, make_pack, place
from vlmrl.errors import ConfigError
from vlmrl.models.attention import PACKED
from vlmrl.models.expert_replay import ExpertReplay
from vlmrl.models.expert_settings import check_experts
from vlmrl.models.experts import RouterLogits, plain_experts, routers, use_experts
from vlmrl.models.inputs import model_inputs
from vlmrl.models.scorer import Scorer

Make = Callable[..., Any]
OURS = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}


@pytest.mark.parametrize(("family", "number"), [("qwen3_moe", 2), ("qwen3_vl_moe", 2), ("qwen3_vl", 0), ("llama", 0)])
def test_every_layer_with_experts_has_a_router(net: Make, family: str, number: int) -> None:
    assert len(routers(net(family))) == number


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_experts_compute_in_fp64_only_within_the_context(net: Make, family: str) -> None:
    model, ids = net(family), torch.arange(20)[None]
    expected = model(ids).logits
    wide = net(family).double()
    with plain_experts(wide):
        torch.testing.assert_close(wide(ids).logits.float(), expected, atol=1e-4, rtol=0)
    with pytest.raises(RuntimeError, match="Float32"):
        wide(ids)


# ---------------------------------------------------------------- router logits


def balance_of(model: PreTrainedModel, reader: Make, family: str, pack: Pack, *, checkpointing: bool = False) -> Any:
    """The load balance loss of a pass, and its gradients."""
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recorded = RouterLogits(model)
    scorer = Scorer(model)
    scores = scorer(model_inputs(model, reader(family), pack))
    with torch.no_grad():
        scorer(model_inputs(model, reader(family), pack))  # as for a reference, between a pass and its backward pass
    is_token = place(pack, [np.ones(len(sample.tokens), dtype=np.bool_) for sample in pack.samples], False)
    logits, mask = recorded.take(is_token)
    loss = load_balance_loss(logits, mask, top_k=recorded.top_k)
    (loss + 0.0 * scores.logprobs.sum()).backward()
    assert recorded._logits == [], "nothing is kept of a checkpointed layer"
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_the_balance_is_of_all_tokens_and_reaches_the_routers(
    net: Make, reader: Make, group: Make, family: str, checkpointing: bool
) -> None:
    samples = [s for seed in (1, 2) for s in group(family, seed if "_vl" in family else 0, seed, (5,))]
    padded, packed = (make_pack(samples, range(2), layout) for layout in ("padded", "packed"))
    loss, slopes = balance_of(net(family), reader, family, padded)
    other, others = balance_of(net(family, attention=OURS), reader, family, packed, checkpointing=checkpointing)
    assert other == pytest.approx(loss, abs=1e-6)
    assert slopes.keys() == others.keys()
    assert {name for name in slopes if name.endswith("mlp.gate.weight")}
    for name, slope in slopes.items():
        torch.testing.assert_close(others[name], slope, atol=1e-5, rtol=1e-4)


def test_the_balance_is_that_of_the_models_own_output(net: Make, reader: Make, group: Make) -> None:
    samples = [s for seed in (1, 2) for s in group("qwen3_moe", 0, seed, (5 * seed,))]
    pack = make_pack(samples, range(2), "padded")
    inputs = model_inputs(net("qwen3_moe"), reader("qwen3_moe"), pack)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    mask = torch.arange(inputs["input_ids"].shape[1])[None] < lengths[:, None]
    theirs = net("qwen3_moe")(inputs["input_ids"], attention_mask=mask.long(), output_router_logits=True).aux_loss
    assert balance_of(net("qwen3_moe"), reader, "qwen3_moe", pack)[0] == pytest.approx(theirs.item(), abs=1e-5)


def test_a_model_without_experts_has_nothing_to_balance(net: Make) -> None:
    with pytest.raises(ConfigError, match=r"actor\.aux_loss_coef is for mixtures of experts"):
        RouterLogits(net("qwen3"))


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8, "moe_intermediate_size": 16}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
RANKS = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
JAMBA = {"num_experts": 4, "use_mamba_kernels": False, "attn_layer_period": 1, "attn_layer_offset": 0}


@pytest.mark.parametrize(
    ("kind", "sizes", "number"),
    [
        ("mixtral", {"num_local_experts": 4}, 2),
        ("olmoe", {"num_experts": 4}, 2),
        ("granitemoe", {"num_local_experts": 4}, 2),
        ("phimoe", {"num_local_experts": 4}, 2),
        ("jamba", JAMBA | {"expert_layer_period": 1, "expert_layer_offset": 0}, 2),
        ("jamba", JAMBA | {"expert_layer_period": 2, "expert_layer_offset": 1}, 1),
    ],
)
def test_logits_of_other_models_are_those_that_transformers_records(
    kind: str, sizes: dict[str, Any], number: int
) -> None:
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes)).eval()
    ids = torch.arange(16)[None]
    theirs = net.base_model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
    recorded = RouterLogits(net)
    net.base_model(input_ids=ids, use_cache=False)
    logits, _ = recorded.take(torch.ones_like(ids, dtype=torch.bool))
    assert len(routers(net)) == number
    assert logits.requires_grad
    torch.testing.assert_close(logits, torch.stack([rows.flatten(0, -2) for rows in theirs]))


@pytest.mark.parametrize(("kind", "sizes"), [("glm4_moe", GROUPS), ("deepseek_v3", GROUPS | RANKS)])
def test_models_that_even_their_experts_by_a_bias_are_refused(kind: str, sizes: dict[str, Any]) -> None:
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes))
    with pytest.raises(ConfigError, match=f"aux_loss_coef: {kind} evens its experts by a bias"):
        RouterLogits(net)


@pytest.mark.parametrize(("kind", "sizes"), [("granitemoe", {"num_local_experts": 4}), ("glm4_moe", GROUPS)])
def test_routers_whose_choice_cannot_be_replaced_are_refused(kind: str, sizes: dict[str, Any]) -> None:
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | sizes))
    ids = torch.arange(16)[None]
    ExpertReplay(net).use(torch.zeros(1, 16, len(routers(net)), 2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"algo\.routing_replay: the routers of this model"):
        net.base_model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize("output", [lambda logits: logits.long(), lambda logits: logits[:, :2], lambda logits: None])
def test_routers_without_logits_of_all_experts_are_refused(net: Make, output: Callable[[Any], Any]) -> None:
    model = net("qwen3_moe")
    routers(model)[1].register_forward_hook(lambda module, args, given: (output(given[0]), *given[1:]))
    RouterLogits(model)
    with pytest.raises(ConfigError, match=r"actor\.aux_loss_coef: the routers .* no logits of its 4 experts"):
        model.base_model(input_ids=torch.arange(20)[None])


def test_a_configuration_that_does_not_count_experts_is_refused(net: Make) -> None:
    model = net("qwen3_moe")
    model.config.num_experts = 0
    with pytest.raises(ConfigError, match=r"qwen3_moe's configuration has none of num_experts, num_local"):
        RouterLogits(model)


# ---------------------------------------------------------------- settings


def test_settings_of_experts_need_experts(folder: Callable[..., Path]) -> None:
    dense, mixture = (Model(model_name_or_path=str(folder(family))) for family in ("qwen3", "qwen3_moe"))
    check_experts(dense, Ds())
    check_experts(mixture.model_copy(update={"aux_loss_coef": 0.1}), Ds(experts_implementation="eager"))
    with pytest.raises(ConfigError, match=r"actor\.aux_loss_coef is for mixtures"):
        check_experts(dense.model_copy(update={"aux_loss_coef": 0.1}), Ds())
    with pytest.raises(ConfigError, match=r"ds\.experts_implementation is for mixtures"):
        check_experts(dense, Ds(experts_implementation="grouped_mm"))
    with pytest.raises(ConfigError, match=r"algo\.routing_replay is for mixtures"):
        check_experts(dense, Ds(), replays=True)
    with pytest.raises(ConfigError, match=r"ds\.load_in_4bit"):
        check_experts(mixture, Ds(load_in_4bit=True))
    check_experts(mixture, Ds(expert_parallel_size=4))
    with pytest.raises(ConfigError, match=r"ds\.expert_parallel_size is for mixtures"):
        check_experts(dense, Ds(expert_parallel_size=2))
    with pytest.raises(ConfigError, match="8 does not divide the 4 experts of a layer: use one of 1, 2, 4"):
        check_experts(mixture, Ds(expert_parallel_size=8))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_all_kernels_of_experts_agree(net: Make, implementation: Any) -> None:
    model, ids = net("qwen3_vl_moe"), torch.arange(20)[None]
    expected = model(ids).logits
    use_experts(model, implementation)
    assert {m.config._experts_implementation for m in model.modules() if type(m).__name__.endswith("Experts")} == {
        implementation
    }
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)
