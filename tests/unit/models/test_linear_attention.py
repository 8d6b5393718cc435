"""Linear attention runs per span: equal to one sample per row in every family, and no state leaks."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from vlmrl.data.packing import Branch, Pack, collect, make_pack, place
from vlmrl.errors import ConfigError
from vlmrl.models import linear_attention
from vlmrl.models.attention import PACKED, check_layers
from vlmrl.models.attention_plan import AttentionPlan, Span, plan_attention
from vlmrl.models.double_precision import KeepDouble
from vlmrl.models.inputs import model_inputs
from vlmrl.models.linear_attention import LinearAttention, follows_plan, mixes_samples, run_per_span, state_of
from vlmrl.models.scorer import Scorer
from vlmrl.models.sequence import check_divisible
from vlmrl.types import Sample

Make = Callable[..., Any]
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
CONFIGS: dict[str, Any] = {
    "qwen3_5": (Qwen3_5TextConfig, {}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, EXPERTS),
    "qwen3_next": (Qwen3NextConfig, EXPERTS),
}


@pytest.fixture(autouse=True)
def fp64() -> Any:
    with KeepDouble():
        yield


def model(family: str = "qwen3_5", attention: str = PACKED) -> PreTrainedModel:
    """An fp64 model that runs per span."""
    kind, more = CONFIGS[family]
    torch.manual_seed(0)
    # The default kernel of the experts has no fp64.
    net: PreTrainedModel = AutoModelForCausalLM.from_config(
        kind(**SHAPE, **more), attn_implementation=attention, experts_implementation="eager", dtype=torch.float64
    )
    run_per_span(net)
    return net.eval()


def samples(*groups: tuple[int, tuple[int, ...]]) -> list[Sample]:
    """A random prompt per (tokens of the prompt, tokens of each response)."""
    rng = np.random.default_rng(0)
    made = []
    for number, (prompt_length, lengths) in enumerate(groups):
        prompt = rng.integers(0, 256, prompt_length)
        for length in lengths:
            tokens = np.concatenate([prompt, rng.integers(0, 256, length)])
            made.append(Sample(tokens, np.arange(len(tokens)) >= prompt_length, (), number))
    return made


# A prompt shorter than the convolution, one of exactly a chunk of 64, one of several chunks; single tokens.
GROUPS = ((2, (1, 70, 3)), (64, (64, 1)), (150, (5,)), (1, (1, 2)), (70, (130, 129)), (64, (2, 9)))


def scores(net: PreTrainedModel, read: Any, pack: Pack, change: Any = None) -> tuple[Any, dict[str, Tensor]]:
    net.zero_grad()
    inputs = model_inputs(net, read, pack)
    if change is not None:
        change(inputs)
    out = Scorer(net)(inputs)
    # Unequal weights: a loss that is symmetric in the tokens could hide exchanged gradients.
    weights = [np.sin(np.arange(len(sample.tokens)) + i) for i, sample in enumerate(pack.samples)]
    rows = collect(pack, out.logprobs)
    (out.logprobs * place(pack, weights, fill=0.0)).sum().backward()
    return rows, {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def assert_equal(ours: Any, expected: Any) -> None:
    for mine, other in zip(ours[0], expected[0], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-10)
    assert ours[1].keys() == expected[1].keys()
    for name, gradient in ours[1].items():
        scale = float(expected[1][name].abs().max())
        torch.testing.assert_close(gradient, expected[1][name], atol=1e-10 * scale, rtol=1e-8)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_layouts_equal_one_sample_per_pass(reader: Make, family: str) -> None:
    net, read, made = model(family), reader("qwen3"), samples(*GROUPS)
    alone: list[Any] = []
    gradients: dict[str, Tensor] = {}
    for i, sample in enumerate(made):
        pack = make_pack([sample], [0], "padded")
        inputs = model_inputs(net, read, pack)
        net.zero_grad()
        out = Scorer(net)(inputs)
        (out.logprobs * torch.from_numpy(np.sin(np.arange(len(sample.tokens)) + i))).sum().backward()
        alone += collect(pack, out.logprobs)
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad
    for layout in ("padded", "packed", "shared"):
        pack = make_pack(made, range(len(made)), layout)  # type: ignore[arg-type]
        assert_equal(scores(net, read, pack), (alone, gradients))


def test_rows_of_several_samples_and_padding(reader: Make) -> None:
    net, read, made = model(), reader("qwen3"), samples((5, (3, 9)), (70, (4, 1)), (8, (6,)))
    rows = ((Branch((2, 3), 70), Branch((4,), 0)), (Branch((1, 0), 5),))
    pack = Pack(tuple(made), rows, tuple(range(5)))
    assert_equal(scores(net, read, pack), scores(net, read, make_pack(made, range(5), "padded")))


def test_transformers_own_attention_gets_the_plan_too(reader: Make) -> None:
    net, read, made = model(attention="sdpa"), reader("qwen3"), samples((5, (3,)), (70, (4,)))
    pack = make_pack(made, range(2), "packed")
    assert_equal(scores(net, read, pack), scores(net, read, make_pack(made, range(2), "padded")))


# ---------------------------------------------------------------- planted leaks


def spans_without_parents(plan: AttentionPlan) -> AttentionPlan:
    return plan_attention(tuple(span._replace(parent=None) for span in plan.spans), causal=True)


def one_span(plan: AttentionPlan) -> AttentionPlan:
    return plan_attention((Span(0, plan.length),), causal=True)


def exchanged_parents(plan: AttentionPlan) -> AttentionPlan:
    """The first two groups have prompts of equal length."""
    other = {0: 3, 3: 0}
    spans = (span._replace(parent=other.get(span.parent, span.parent)) for span in plan.spans)  # type: ignore[arg-type]
    return plan_attention(tuple(spans), causal=True)


@pytest.mark.parametrize("fault", [spans_without_parents, one_span, exchanged_parents])
def test_a_wrong_plan_of_linear_attention_alone_is_found(
    reader: Make, monkeypatch: pytest.MonkeyPatch, fault: Callable[[AttentionPlan], AttentionPlan]
) -> None:
    net, read, made = model(), reader("qwen3"), samples((6, (4, 3)), (6, (5, 2)))
    pack = make_pack(made, range(4), "shared")
    expected, _ = scores(net, read, make_pack(made, range(4), "padded"))
    sound = linear_attention._run_spans
    assert max(np.abs(a - b).max() for a, b in zip(scores(net, read, pack)[0], expected, strict=True)) < 1e-10
    monkeypatch.setattr(linear_attention, "_run_spans", lambda run, flat, plan: sound(run, flat, fault(plan)))
    assert max(np.abs(a - b).max() for a, b in zip(scores(net, read, pack)[0], expected, strict=True)) > 1e-3


def test_layers_that_ignore_the_plan_leak(reader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    net, read, made = model(), reader("qwen3"), samples((6, (4,)), (6, (5,)))
    pack = make_pack(made, range(2), "packed")
    expected, _ = scores(net, read, make_pack(made, range(2), "padded"))

    def over_rows(run: Any, flat: Tensor, plan: AttentionPlan) -> Tensor:
        output: Tensor = run(flat[None])
        return output[0]

    monkeypatch.setattr(linear_attention, "_run_spans", over_rows)
    rows, _ = scores(net, read, pack)
    np.testing.assert_allclose(rows[0], expected[0], atol=1e-10)
    assert np.abs(rows[1] - expected[1]).max() > 1e-2


# ---------------------------------------------------------------- which layers


def test_the_class_changes_and_parameters_do_not() -> None:
    net = model()
    layers = [module for module in net.modules() if isinstance(module, LinearAttention)]
    assert len(layers) == 2
    assert {type(layer).__name__ for layer in layers} == {"Qwen3_5GatedDeltaNet"}
    assert follows_plan(net)
    assert not mixes_samples(net)
    before = list(net.state_dict())
    run_per_span(net)
    assert list(net.state_dict()) == before
    assert [type(module) for module in copy.deepcopy(net).modules() if isinstance(module, LinearAttention)] == [
        type(layer) for layer in layers
    ]


def test_a_layer_of_the_same_name_from_elsewhere_is_left_alone() -> None:
    net = model()
    layer = next(module for module in net.modules() if isinstance(module, LinearAttention))
    layer.__class__ = type("Qwen3_5GatedDeltaNet", (nn.Module,), {"__module__": "transformers_modules.mine"})
    run_per_span(net)
    assert not isinstance(layer, LinearAttention)
    assert mixes_samples(net)
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM, which has recurrent layers, would mix: use padded"):
        check_layers(net, samples_share_rows=True)
    check_layers(net, samples_share_rows=False)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "rwkv"])
def test_other_recurrent_layers_stay_padded(family: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64, "intermediate_size": 32, "state_size": 4}
    sizes["pad_token_id"] = 0
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    run_per_span(net)
    assert mixes_samples(net)
    with pytest.raises(ConfigError, match=f"samples of {type(net).__name__}, which has recurrent layers"):
        check_layers(net, samples_share_rows=True)


@pytest.mark.parametrize(
    ("family", "layers", "state"),
    [
        ("minimax", {"layer_types": ["linear_attention", "full_attention"]}, "layers of linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
        ("lfm2", {"layer_types": ["full_attention", "full_attention"]}, None),
        ("qwen3", {}, None),
    ],
)
def test_layers_with_a_state_that_transformers_does_not_mark_stay_padded(
    family: str, layers: dict[str, list[str]], state: str | None
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 32, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **layers))
    run_per_span(net)
    assert not net._is_stateful
    assert state_of(net) == state
    check_layers(net, samples_share_rows=False)
    if state is None:
        check_layers(net, samples_share_rows=True)
        check_divisible(net, 2)
        return
    with pytest.raises(ConfigError, match=f"samples of {type(net).__name__}, which has {state}, would mix"):
        check_layers(net, samples_share_rows=True)
    with pytest.raises(ConfigError, match=f"{type(net).__name__} has {state}, which pass a state"):
        check_divisible(net, 2)


def test_a_convolution_in_a_layer_of_attention_is_a_state() -> None:
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", num_hidden_layers=1, vocab_size=64))
        net.model.layers[0].self_attn.short = nn.Conv1d(4, 4, 3)
    assert state_of(net) == "convolutions"
    assert mixes_samples(net)


def test_deepspeed_gathers_a_layer_as_a_whole() -> None:
    from deepspeed.utils import z3_leaf_module  # slow to import

    assert [z3_leaf_module(module) for module in model().modules() if isinstance(module, LinearAttention)] == [True] * 2


@pytest.mark.parametrize("embeddings", ["trained", "frozen"])
def test_backward_hooks_run_behind_the_gradients_of_the_layer(reader: Make, embeddings: str) -> None:
    net, seen = model(), []
    net.get_input_embeddings().requires_grad_(embeddings == "trained")

    def record(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append(all(parameter.grad is not None for parameter in layer.parameters()))

    for layer in net.modules():
        if isinstance(layer, LinearAttention):
            layer.register_full_backward_hook(record)
    made = samples((6, (4, 3)), (6, (5, 2)))
    scores(net, reader("qwen3"), make_pack(made, range(4), "shared"))
    assert seen == [True, True]


# ---------------------------------------------------------------- schedules


def test_parents_run_first_padded_in_front() -> None:
    spans = (Span(0, 3), Span(3, 1, 0), Span(4, 2), Span(6, 70, 2), Span(76, 65), Span(141, 3), Span(144, 2, 5))
    schedule = linear_attention._schedule(plan_attention(spans, causal=True), CPU)
    tokens = [batch.tokens.tolist() for batch in schedule.batches]
    # Spans without a parent: of at most one chunk of 64, and of two.
    assert tokens[0] == [[0, 1, 2], [4, 4, 5], [141, 142, 143]]
    assert tokens[1] == [list(range(76, 141))]
    # Children likewise, padded behind.
    assert tokens[2] == [[3, 3], [144, 145]]
    assert tokens[3] == [list(range(6, 76))]
    zeros = [None if batch.zeros is None else batch.zeros.tolist() for batch in schedule.batches]
    assert zeros == [[[False] * 3, [True, False, False], [False] * 3], None, None, None]
    parents = [None if batch.parents is None else batch.parents.tolist() for batch in schedule.batches]
    # The third to run is the span at 141, the second that at 4.
    assert parents == [None, None, [0, 2], [1]]
    flat = torch.cat([batch.tokens.flatten() for batch in schedule.batches])
    assert flat[schedule.order].tolist() == list(range(146))


def test_without_parents_padding_is_behind() -> None:
    schedule = linear_attention._schedule(plan_attention((Span(0, 3), Span(3, 2)), causal=True), CPU)
    (batch,) = schedule.batches
    assert batch.tokens.tolist() == [[0, 1, 2], [3, 4, 4]]
    assert batch.zeros is None


def test_padding_in_front_that_is_not_zero_is_found(reader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    net, read, made = model(), reader("qwen3"), samples((6, (4, 3)), (3, (5, 2)))
    pack = make_pack(made, range(4), "shared")
    expected, _ = scores(net, read, make_pack(made, range(4), "padded"))
    schedule = linear_attention._schedule

    def unmasked(plan: AttentionPlan, device: torch.device) -> Any:
        planned = schedule(plan, device)
        assert any(batch.zeros is not None for batch in planned.batches)
        return planned._replace(batches=tuple(batch._replace(zeros=None) for batch in planned.batches))

    monkeypatch.setattr(linear_attention, "_schedule", unmasked)
    rows, _ = scores(net, read, pack)
    for row, other in zip(rows[:2], expected[:2], strict=True):
        np.testing.assert_allclose(row, other, atol=1e-10)
    assert max(np.abs(a - b).max() for a, b in zip(rows[2:], expected[2:], strict=True)) > 1e-3


def test_a_single_token_behind_a_prompt_is_no_step_of_decoding() -> None:
    spans = (Span(0, 3), Span(3, 1, 0), Span(4, 1), Span(5, 1), Span(6, 1, 3))
    schedule = linear_attention._schedule(plan_attention(spans, causal=True), CPU)
    assert [list(batch.tokens.shape) for batch in schedule.batches] == [[3, 3], [2, 2]]
