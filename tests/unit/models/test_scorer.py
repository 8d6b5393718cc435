"""Packed equals padded equals the model's own logits, and the ways to get it wrong are noticed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.data.packing import Pack, collect, make_pack
from vlmrl.errors import ConfigError
from vlmrl.models.attention import PACKED
from vlmrl.models.inputs import model_inputs
from vlmrl.models.scorer import Scorer
from vlmrl.models.tiny import Family
from vlmrl.types import Layout, Sample

Make = Callable[..., Any]

CASES = {"text": (0, 0, 0), "one image": (1, 1), "three images": (3, 3), "mixed": (0, 1, 3, 0, 2)}
VISION: list[Family] = ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"]
RUNS = [(family, case) for family in ("qwen2_5_vl", "qwen3_vl") for case in CASES]
RUNS += [("qwen2_vl", "mixed"), ("qwen3", "text"), ("llama", "text")]
OURS = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}
TEMPERATURE, BANNED = 0.7, (7, 300)


class Run(NamedTuple):
    logprobs: list[np.ndarray[Any, Any]]
    entropy: list[np.ndarray[Any, Any]]
    loss: float
    gradients: dict[str, Tensor]


def run(net: PreTrainedModel, inputs: dict[str, Any], pack: Pack) -> Run:
    scorer = Scorer(net)
    scorer.zero_grad()
    out = scorer(inputs, temperature=TEMPERATURE, banned=BANNED)
    loss = -(out.logprobs.sum() - 0.1 * out.entropy.sum()) / inputs["scored"].sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return Run(collect(pack, out.logprobs), collect(pack, out.entropy), loss.item(), gradients)


def difference(a: Run, b: Run) -> float:
    """The largest difference of any log-prob, entropy or loss; of gradients, relative to their tensor's largest."""
    assert a.gradients.keys() == b.gradients.keys()
    values = [np.abs(x - y).max() for x, y in zip(a.logprobs + a.entropy, b.logprobs + b.entropy, strict=True)]
    slopes = [
        ((g - b.gradients[n]).abs().max() / b.gradients[n].abs().max().clamp(min=1.0)).item()
        for n, g in a.gradients.items()
    ]
    return float(max(*values, *slopes, abs(a.loss - b.loss)))


def pack_of(sample: Make, family: Family, images: tuple[int, ...], layout: Layout) -> Pack:
    samples = [sample(family, count, seed) for seed, count in enumerate(images)]
    return make_pack(samples, range(len(samples)), layout)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("family", "case"), RUNS)
def test_packed_equals_padded(net: Make, reader: Make, sample: Make, family: Family, case: str, tied: bool) -> None:
    padded, packed = (pack_of(sample, family, CASES[case], layout) for layout in ("padded", "packed"))
    yardstick = net(family, tied=tied, attention="sdpa")
    expected = run(yardstick, model_inputs(yardstick, reader(family), padded), padded)
    assert max(np.abs(row).max() for row in expected.logprobs) > 1
    for attention in ("sdpa", OURS):
        for pack in (padded, packed):
            model = net(family, tied=tied, attention=attention)
            assert difference(run(model, model_inputs(model, reader(family), pack), pack), expected) < 1e-5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [*VISION, "qwen3", "llama"])
def test_scores_are_those_of_the_models_own_logits(
    net: Make, reader: Make, sample: Make, family: Family, tied: bool
) -> None:
    images = (0, 2) if family in VISION else (0, 0)
    pack = pack_of(sample, family, images, "packed")
    ours, theirs = net(family, tied=tied, attention=OURS), net(family, tied=tied)
    found = run(ours, model_inputs(ours, reader(family), pack), pack)
    ban = torch.zeros(theirs.config.get_text_config().vocab_size)
    ban[list(BANNED)] = -100
    loss = torch.zeros(())
    count = sum(int(s.sampled.sum()) for s in pack.samples)
    for item, mine in zip(pack.samples, found.logprobs, strict=True):
        tokens = torch.from_numpy(item.tokens)[None]
        more = reader(family).pixel_inputs(item.media)
        if more:
            more["mm_token_type_ids"] = torch.from_numpy(reader(family).token_types(item.tokens))[None]
        log_p = ((theirs(tokens, **more).logits[0, :-1] + ban) / TEMPERATURE).log_softmax(-1)
        chosen = log_p.gather(1, tokens[0, 1:, None])[:, 0]
        sampled = torch.from_numpy(item.sampled[1:])
        np.testing.assert_allclose(mine[1:], torch.where(sampled, chosen, 0.0).detach(), atol=1e-5)
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = loss - (chosen - 0.1 * entropy)[sampled].sum() / count
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().clamp(min=1.0).item()
            torch.testing.assert_close(found.gradients[name], parameter.grad, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", OURS], ids=["sdpa", "ours"])
@pytest.mark.parametrize("family", VISION)
def test_a_sample_never_sees_its_neighbours(
    net: Make, reader: Make, sample: Make, family: Family, attention: str | dict[str, str]
) -> None:
    model = net(family, attention=attention)
    before = pack_of(sample, family, (1, 2, 0), "packed")
    for changed in range(3):
        samples = list(before.samples)
        samples[changed] = sample(family, (2, 0, 1)[changed], 77)
        after = make_pack(samples, range(3), "packed")
        first, second = (run(model, model_inputs(model, reader(family), pack), pack) for pack in (before, after))
        for i in range(3):
            if i != changed:
                np.testing.assert_allclose(first.logprobs[i], second.logprobs[i], atol=1e-5)


def two_rows(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = inputs["position_ids"][0]


def three_rows(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = inputs["position_ids"][1:]


def default_cache(inputs: dict[str, Any]) -> None:
    del inputs["use_cache"]


def no_lengths(inputs: dict[str, Any]) -> None:
    del inputs["cu_seq_lens_q"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("fault", "attention"), [(two_rows, "sdpa"), (three_rows, "sdpa"), (default_cache, "sdpa"), (no_lengths, OURS)]
)
def test_a_planted_fault_breaks_the_equality(
    net: Make, reader: Make, sample: Make, family: Family, fault: Callable[..., None], attention: str | dict[str, str]
) -> None:
    model = net(family, attention=attention)
    padded, packed = (pack_of(sample, family, CASES["mixed"], layout) for layout in ("padded", "packed"))
    expected = run(model, model_inputs(model, reader(family), padded), padded)
    inputs = model_inputs(model, reader(family), packed)
    assert difference(run(model, inputs, packed), expected) < 1e-5
    fault(inputs)
    assert difference(run(model, inputs, packed), expected) > 1e-3


@pytest.mark.parametrize("family", VISION)
def test_an_image_that_several_samples_share_goes_through_the_tower_once(
    net: Make, reader: Make, sample: Make, family: Family
) -> None:
    one, two, text = sample(family, 2, 1), sample(family, 1, 2), sample(family, 0, 3)
    pack = make_pack([one, two, text, one, two, one], range(6), "packed")
    model = net(family, attention=OURS)
    inputs = model_inputs(model, reader(family), pack)
    assert len(inputs["image_grid_thw"]) == 3
    assert inputs["image_occurrences"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    together = run(model, inputs, pack)
    for i, item in enumerate(pack.samples):
        alone = make_pack([item], [0], "padded")
        expected = run(model, model_inputs(model, reader(family), alone), alone)
        np.testing.assert_allclose(together.logprobs[i], expected.logprobs[0], atol=1e-5)


def test_rows_of_packed_samples_may_differ_in_length(net: Make, reader: Make, sample: Make) -> None:
    samples = [sample("qwen3", 0, seed) for seed in range(4)]
    pack = Pack(tuple(samples), ((3, 0), (2,), (1,)), (0, 1, 2, 3))
    alone = make_pack(samples, range(4), "padded")
    for attention in ("sdpa", OURS):
        model = net("qwen3", attention=attention)
        expected = run(model, model_inputs(model, reader("qwen3"), alone), alone)
        assert difference(run(model, model_inputs(model, reader("qwen3"), pack), pack), expected) < 1e-5


def test_a_pack_without_sampled_tokens_trains_nothing(net: Make, reader: Make) -> None:
    model = net("qwen2_5_vl", attention=OURS)
    blank: Sample = reader("qwen2_5_vl").dummy_sample()
    pack = make_pack([blank], [-1], "packed")
    out = Scorer(model)(model_inputs(model, reader("qwen2_5_vl"), pack))
    (out.logprobs.sum() * 0).backward()
    touched = [name for name, p in model.named_parameters() if p.grad is not None]
    assert any("visual" in name for name in touched)
    assert all(p.grad.abs().max() == 0 for p in model.parameters() if p.grad is not None)


def test_parameters_keep_their_names_and_their_tie(net: Make) -> None:
    model = net("qwen3", tied=True)
    names = list(model.state_dict())
    scorer = Scorer(model)
    assert [name.removeprefix("net.") for name in scorer.state_dict()] == names
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_model_that_bends_its_logits_is_refused(net: Make) -> None:
    model = net("llama")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        Scorer(model)


def test_gradient_checkpointing_changes_nothing(net: Make, reader: Make, sample: Make) -> None:
    pack = pack_of(sample, "qwen2_5_vl", CASES["mixed"], "packed")
    model = net("qwen2_5_vl", attention=OURS)
    expected = run(model, model_inputs(model, reader("qwen2_5_vl"), pack), pack)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert difference(run(model, model_inputs(model, reader("qwen2_5_vl"), pack), pack), expected) < 1e-6


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_bf16_models_score_in_fp32(net: Make, reader: Make, sample: Make, family: Family) -> None:
    pack = pack_of(sample, family, (1, 2) if family in VISION else (0, 0), "packed")
    model = net(family, attention=OURS)
    expected = run(model, model_inputs(model, reader(family), pack), pack)
    found = run(model.bfloat16(), model_inputs(model, reader(family), pack), pack)
    assert found.logprobs[0].dtype == np.float32
    for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=0.5)
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.bfloat16}
