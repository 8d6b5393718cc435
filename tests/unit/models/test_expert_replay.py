"""Passes that replay experts equal those of the model that chose them, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.data.packing import Pack, collect, make_pack
from vlmrl.errors import ConfigError
from vlmrl.models.attention import PACKED
from vlmrl.models.experts import routers
from vlmrl.models.inputs import model_inputs
from vlmrl.models.scorer import Scorer
from vlmrl.types import Layout, Sample

Make = Callable[..., Any]
OURS = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}
FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])


class Passed(NamedTuple):
    logprobs: list[np.ndarray[Any, Any]]
    gradients: dict[str, Tensor]


def run(net: PreTrainedModel, inputs: dict[str, Any], pack: Pack) -> Passed:
    scorer = Scorer(net)
    scorer.zero_grad()
    logprobs = scorer(inputs).logprobs
    (-logprobs.sum() / inputs["scored"].sum()).backward()
    return Passed(collect(pack, logprobs), {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})


def difference(a: Passed, b: Passed) -> float:
    """Largest difference of log-probs, and of gradients relative to their tensor."""
    values = [np.abs(x - y).max() for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    slopes = [
        float((g - b.gradients[n]).abs().max() / b.gradients[n].abs().max().clamp(min=1.0))
        for n, g in a.gradients.items()
    ]
    return float(max(*values, *slopes))


def recorded(net: PreTrainedModel, reader: Any, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the experts that the model chooses for all tokens but the last, as an engine records them."""
    out = []
    for sample in samples:
        pack = make_pack([sample], [0], "padded")
        chosen: list[Tensor] = []
        handles = [r.register_forward_hook(partial(_record, chosen)) for r in routers(net)]
        with torch.no_grad():
            Scorer(net)(model_inputs(net, reader, pack))
        for handle in handles:
            handle.remove()
        experts = torch.stack(chosen, dim=1).numpy().astype(np.uint8)  # [T, L, K]
        out.append(replace(sample, experts=experts[:-1]))
    return out


def _record(chosen: list[Tensor], router: Any, args: Any, output: Any) -> None:
    chosen.append(output[2])


def samples_of(group: Make, family: str) -> list[Sample]:
    images = 1 if "_vl" in family else 0
    return [*group(family, images, 1, (5, 3)), *group(family, 0, 2, (4,))]


def with_other_routers(net: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(3)
    with torch.no_grad():
        for router in routers(net):
            router.weight.add_(torch.randn_like(router.weight) * 0.2)  # type: ignore[operator,arg-type]
    return net


@FAMILIES
def test_replay_of_a_models_own_choice_changes_nothing(net: Make, reader: Make, group: Make, family: str) -> None:
    samples = recorded(net(family), reader(family), samples_of(group, family))
    pack = make_pack(samples, range(3), "padded")
    plain = run(net(family), model_inputs(net(family), reader(family), pack), pack)
    replayed = run(net(family), model_inputs(net(family), reader(family), pack, replays_experts=True), pack)
    assert difference(replayed, plain) < 1e-6


@FAMILIES
def test_all_layouts_replay_the_recorded_experts(net: Make, reader: Make, group: Make, family: str) -> None:
    """The recorded routes are those of other routers: without replay, other experts are chosen."""
    samples = recorded(with_other_routers(net(family)), reader(family), samples_of(group, family))

    def passed(layout: Layout, attention: Any, *, replays: bool = True) -> Any:
        model, pack = net(family, attention=attention), make_pack(samples, range(3), layout)
        return run(model, model_inputs(model, reader(family), pack, replays_experts=replays), pack)

    expected = passed("padded", "sdpa")
    assert difference(passed("padded", "sdpa", replays=False), expected) > 1e-2
    for layout in ("packed", "shared"):
        assert difference(passed(layout, OURS), expected) < 1e-5  # type: ignore[arg-type]
    gates = [gradient for name, gradient in expected.gradients.items() if name.endswith("mlp.gate.weight")]
    assert gates
    assert all(bool(gradient.any()) for gradient in gates), "routers learn"


def test_the_weights_are_a_softmax_of_the_trainers_logits_over_the_recorded_experts(
    net: Make, reader: Make, group: Make
) -> None:
    (sample,) = samples_of(group, "qwen3_moe")[2:]
    experts = np.zeros((len(sample.tokens) - 1, 2, 2), dtype=np.uint8)
    experts[..., 1] = 3
    model, pack = net("qwen3_moe"), make_pack([replace(sample, experts=experts)], [0], "padded")
    scorer, seen = Scorer(model), []
    scorer(model_inputs(model, reader("qwen3_moe"), pack, replays_experts=True))  # installs the replay
    assert scorer.expert_replay is not None
    scorer.expert_replay.take_counts()
    routers(model)[0].register_forward_hook(lambda module, args, output: seen.append(output))
    scorer(model_inputs(model, reader("qwen3_moe"), pack, replays_experts=True))
    logits, weights, chosen = seen[0]
    assert (chosen[:-1] == torch.tensor([0, 3])).all()
    assert chosen[-1].tolist() == logits[-1].topk(2).indices.tolist(), "the last token was not recorded"
    torch.testing.assert_close(weights[:-1], logits[:-1, [0, 3]].softmax(-1))
    differs, count = scorer.expert_replay.take_counts().tolist()
    assert count == 2 * len(experts)
    assert 0 < differs <= count


def test_replay_holds_while_checkpointed_layers_are_computed_again(net: Make, reader: Make, group: Make) -> None:
    family = "qwen3_moe"
    samples = recorded(with_other_routers(net(family)), reader(family), samples_of(group, family))
    pack = make_pack(samples, range(3), "shared")
    model = net(family, attention=OURS)
    expected = run(model, model_inputs(model, reader(family), pack, replays_experts=True), pack)
    model = net(family, attention=OURS).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert (
        difference(run(model, model_inputs(model, reader(family), pack, replays_experts=True), pack), expected) < 1e-6
    )


def test_the_counts_are_of_the_last_pass_only(net: Make, reader: Make, group: Make) -> None:
    """Not of a pass before it without a gradient, and not of layers that its backward pass computes again."""
    family = "qwen3_moe"
    samples = recorded(with_other_routers(net(family)), reader(family), samples_of(group, family))
    pack = make_pack(samples, range(3), "padded")
    model = net(family).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scorer = Scorer(model)
    inputs = model_inputs(model, reader(family), pack, replays_experts=True)
    with torch.no_grad():
        scorer(inputs)
    num_choices = 2 * sum(len(sample.tokens) - 1 for sample in samples)
    for _ in range(2):
        output = scorer(inputs)
        assert scorer.take_replay_counts()[1] == num_choices
        output.logprobs.sum().backward()


def test_experts_of_another_model_are_refused(net: Make, reader: Make, group: Make) -> None:
    (sample,) = samples_of(group, "qwen3_moe")[2:]
    experts = np.zeros((len(sample.tokens), 5, 2), dtype=np.uint8)
    pack = make_pack([replace(sample, experts=experts)], [0], "padded")
    model = net("qwen3_moe", attention=PACKED)
    with pytest.raises(ConfigError, match="experts of 5 layers, but the trainer's model has 2"):
        Scorer(model)(model_inputs(model, reader("qwen3_moe"), pack, replays_experts=True))
