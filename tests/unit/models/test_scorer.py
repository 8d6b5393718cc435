"""All layouts equal each other and the model's own logits, and planted faults are detected."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.data.packing import Branch, Pack, collect, make_pack
from vlmrl.errors import ConfigError
from vlmrl.models.attention import PACKED
from vlmrl.models.attention_plan import Span, plan_attention
from vlmrl.models.double_precision import KeepDouble
from vlmrl.models.inputs import model_inputs
from vlmrl.models.load import freeze
from vlmrl.models.scorer import ImageFeatures, Scorer
from vlmrl.models.tiny import Family
from vlmrl.types import Layout, Media, Sample

Make = Callable[..., Any]
Attention = str | dict[str, str]

# (images, tokens of each response) per group
CASES: dict[str, Sequence[tuple[int, Sequence[int]]]] = {
    "text": [(0, (5, 2, 9)), (0, (4,)), (0, (3, 3))],
    "one image": [(1, (3, 7)), (1, (6, 1))],
    "three images": [(3, (4, 8)), (3, (5,))],
    "mixed": [(0, (4, 9)), (1, (6,)), (3, (2, 5, 11)), (0, (7,)), (2, (0, 3))],
    "groups of eight": [(1, (1, 2, 3, 5, 8, 13, 21, 4)), (0, (6,) * 8)],
}
OTHERS: list[Family] = ["glm4v", "internvl", "gemma3", "smolvlm"]
"""Families of images other than Qwen's."""
VISION: list[Family] = ["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_5", "qwen3_vl_moe", *OTHERS]
RUNS: list[tuple[Family, str, bool]] = [
    *(("qwen2_5_vl", case, False) for case in CASES),
    *(("qwen3_vl", case, True) for case in CASES),
    *(("qwen3_5", case, False) for case in CASES),
    ("qwen3_5_text", "text", True),
    *(("qwen2_vl", case, True) for case in ("mixed", "groups of eight")),
    *((family, "mixed", False) for family in OTHERS),
    ("gemma3", "groups of eight", True),
    *(("qwen3", "text", tied) for tied in (False, True)),
    ("llama", "text", False),
    ("qwen3_moe", "text", False),
    ("qwen3_vl_moe", "mixed", True),
]
OURS = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}
TEMPERATURE, BANNED = 0.7, (7, 300)


HYBRID: list[Family] = ["qwen3_5", "qwen3_5_text"]
"""Models with linear attention. Layouts cut samples into different chunks, whose rounding in fp32 can reach 1e-4."""
DOUBLE: list[Family] = [*HYBRID, "internvl", "smolvlm", "gemma3"]
"""Models compared in fp64."""


@contextmanager
def precise(family: Family) -> Iterator[Callable[[PreTrainedModel], PreTrainedModel]]:
    """Compute in fp64 where rounding would hide differences; yields the cast of a model."""
    with KeepDouble() if family in DOUBLE else nullcontext():
        yield lambda model: model.double() if family in DOUBLE else model


class Run(NamedTuple):
    logprobs: list[np.ndarray[Any, Any]]
    entropy: list[np.ndarray[Any, Any]]
    values: list[np.ndarray[Any, Any]]
    loss: float
    gradients: dict[str, Tensor]


def run(net: PreTrainedModel, inputs: dict[str, Any], pack: Pack) -> Run:
    """Run a pass whose loss depends on log-probs, entropy, and a scalar head on the states."""
    scorer = Scorer(net)
    scorer.zero_grad()
    torch.manual_seed(0)
    head = torch.randn(net.config.get_text_config().hidden_size) / 8
    out = scorer(inputs, temperature=TEMPERATURE, banned=BANNED)
    states, targets = scorer.states(inputs)
    scored = inputs["scored"]
    assert torch.equal(targets, inputs["input_ids"][scored])
    states = states.float()
    values = torch.zeros(scored.shape, dtype=states.dtype).masked_scatter(scored, states @ head.to(states))
    loss = -(out.logprobs.sum() - 0.1 * out.entropy.sum() - 0.1 * values.square().sum()) / scored.sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    columns = (collect(pack, column) for column in (out.logprobs, out.entropy, values))
    return Run(*columns, loss.item(), gradients)


def run_of(net: PreTrainedModel, reader: Make, family: Family, pack: Pack) -> Run:
    return run(net, model_inputs(net, reader(family), pack), pack)


def difference(a: Run, b: Run) -> float:
    """Largest difference of log-probs, entropies, values, loss and gradients; gradients relative to their tensor."""
    assert a.gradients.keys() == b.gradients.keys()
    mine, other = ([*passed.logprobs, *passed.entropy, *passed.values] for passed in (a, b))
    values = [np.abs(x - y).max() for x, y in zip(mine, other, strict=True)]
    slopes = [
        ((g - b.gradients[n]).abs().max() / b.gradients[n].abs().max().clamp(min=1.0)).item()
        for n, g in a.gradients.items()
    ]
    return float(max(*values, *slopes, abs(a.loss - b.loss)))


def samples_of(group: Make, family: Family, case: str) -> list[Sample]:
    return [
        sample for seed, (images, lengths) in enumerate(CASES[case]) for sample in group(family, images, seed, lengths)
    ]


def pack_of(group: Make, family: Family, case: str, layout: Layout) -> Pack:
    samples = samples_of(group, family, case)
    return make_pack(samples, range(len(samples)), layout)


# ---------------------------------------------------------------- equal layouts


@pytest.mark.parametrize(("family", "case", "tied"), RUNS)
def test_shared_equals_packed_equals_padded(
    net: Make, reader: Make, group: Make, family: Family, case: str, tied: bool
) -> None:
    padded, packed, shared = (pack_of(group, family, case, layout) for layout in ("padded", "packed", "shared"))
    assert shared.num_tokens < packed.num_tokens == packed.num_useful
    bound = 1e-11 if family in DOUBLE else 1e-5
    with precise(family) as cast:
        expected = run_of(cast(net(family, tied=tied)), reader, family, padded)
        assert max(np.abs(row).max() for row in expected.logprobs) > 1
        assert max(np.abs(row).max() for row in expected.values) > 0.1
        for attention, pack in ((OURS, padded), ("sdpa", packed), (OURS, packed), (OURS, shared)):
            model = cast(net(family, tied=tied, attention=attention))
            assert difference(run_of(model, reader, family, pack), expected) < bound


@pytest.mark.parametrize("family", [*VISION, "qwen3", "qwen3_5_text", "llama", "qwen3_moe"])
def test_scores_equal_those_of_the_models_own_logits(net: Make, reader: Make, group: Make, family: Family) -> None:
    pack = pack_of(group, family, "mixed" if family in VISION else "text", "shared")
    with precise(family) as cast:
        assert_own_logits(cast(net(family, attention=OURS)), cast(net(family)), reader, family, pack)


def assert_own_logits(ours: PreTrainedModel, theirs: PreTrainedModel, reader: Make, family: Family, pack: Pack) -> None:
    scorer = Scorer(ours)
    scores = scorer(model_inputs(ours, reader(family), pack), temperature=TEMPERATURE, banned=BANNED)
    (-(scores.logprobs.sum() - 0.1 * scores.entropy.sum())).backward()
    rows = collect(pack, scores.logprobs)
    ban = torch.zeros(theirs.config.get_text_config().vocab_size)
    ban[list(BANNED)] = -100
    loss = torch.zeros(())
    for item, mine in zip(pack.samples, rows, strict=True):
        tokens = torch.from_numpy(item.tokens)[None]
        more = reader(family).pixel_inputs(item.media)
        if more:
            key = "token_type_ids" if reader(family).attends_both_ways else "mm_token_type_ids"
            more[key] = torch.from_numpy(reader(family).token_types(item.tokens))[None]
        log_p = ((theirs(tokens, **more).logits[0, :-1] + ban) / TEMPERATURE).log_softmax(-1)
        chosen = log_p.gather(1, tokens[0, 1:, None])[:, 0]
        sampled = torch.from_numpy(item.sampled[1:])
        np.testing.assert_allclose(mine[1:], torch.where(sampled, chosen, 0.0).detach(), atol=1e-5)
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = loss - (chosen - 0.1 * entropy)[sampled].sum()
    loss.backward()
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if other.grad is not None:
            scale = other.grad.abs().max().clamp(min=1.0).item()
            torch.testing.assert_close(mine.grad, other.grad, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llama", "qwen3_moe", "qwen3_vl_moe", "internvl", "gemma3"],
)
def test_layouts_are_equal_with_adapters(net: Make, reader: Make, group: Make, family: Family) -> None:
    from peft import LoraConfig

    def adapted(attention: Attention) -> PreTrainedModel:
        model: PreTrainedModel = net(family, attention=attention)
        torch.manual_seed(2)
        # Projections of language model, linear attention and vision tower.
        names = "q_proj|v_proj|down_proj|in_proj_qkv|in_proj_a|out_proj|qkv|proj"
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=rf".*\.({names})"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model.eval()

    case = "mixed" if family in VISION else "text"
    with precise(family) as cast:
        plain, expected = (
            run_of(cast(model), reader, family, pack_of(group, family, case, "padded"))
            for model in (net(family), adapted("sdpa"))
        )
        adapted_runs = [
            run_of(cast(adapted(OURS)), reader, family, pack_of(group, family, case, layout))
            for layout in get_args(Layout)
        ]
    assert np.abs(plain.logprobs[0] - expected.logprobs[0]).max() > 1e-2
    assert expected.gradients
    assert all("lora" in name for name in expected.gradients)
    in_tower = any(reader(family).parameter_group(name) == "vision" for name in expected.gradients)
    assert in_tower == (family in VISION)
    assert any("linear_attn.in_proj_qkv" in name for name in expected.gradients) == (family in HYBRID)
    bound = 1e-11 if family in DOUBLE else 1e-5
    assert max(difference(of_layout, expected) for of_layout in adapted_runs) < bound


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3", "qwen3_moe", *OTHERS])
def test_layouts_are_equal_with_gradient_checkpointing(
    net: Make, reader: Make, group: Make, family: Family, reentrant: bool
) -> None:
    pack = pack_of(group, family, "mixed" if family in VISION else "text", "shared")
    model = net(family, attention=OURS)
    expected = run_of(model, reader, family, pack)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert difference(run_of(model, reader, family, pack), expected) < 1e-6


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3"])
def test_bf16_models_score_in_fp32(net: Make, reader: Make, group: Make, family: Family) -> None:
    pack = pack_of(group, family, "mixed" if family in VISION else "text", "shared")
    model = net(family, attention=OURS)
    expected = run_of(model, reader, family, pack)
    half = run_of(model.bfloat16(), reader, family, pack)
    assert half.logprobs[0].dtype == np.float32
    for mine, theirs in zip(half.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=0.5)
    assert {gradient.dtype for gradient in half.gradients.values()} == {torch.bfloat16}


def test_rows_may_mix_groups_and_samples_of_any_length(net: Make, reader: Make, group: Make) -> None:
    samples = samples_of(group, "qwen2_5_vl", "mixed")
    # Groups of 2, 1, 3, 1 and 2.
    lengths = [min(sample.prompt_length for sample in samples[i : i + 2]) for i in range(len(samples))]
    rows = (
        (Branch((3, 4, 5), lengths[3]), Branch((2,), 0)),
        (Branch((6,), 0),),
        (Branch((8, 7), lengths[7]), Branch((1,), 0), Branch((0,), 0)),
    )
    pack, alone = Pack(tuple(samples), rows, tuple(range(9))), make_pack(samples, range(9), "padded")
    expected = run_of(net("qwen2_5_vl"), reader, "qwen2_5_vl", alone)
    assert difference(run_of(net("qwen2_5_vl", attention=OURS), reader, "qwen2_5_vl", pack), expected) < 1e-5


# ---------------------------------------------------------------- isolation


@pytest.mark.parametrize("family", [*VISION, "qwen3", "qwen3_5_text", "qwen3_moe"])
def test_a_piece_affects_only_pieces_that_attend_to_it(net: Make, reader: Make, group: Make, family: Family) -> None:
    pictures = (1, 2) if family in VISION else (0, 0)
    model = net(family, attention=OURS)
    samples = [
        *group(family, pictures[0], 1, (4, 3, 6)),
        *group(family, pictures[1], 2, (5,)),
        *group(family, 0, 3, (2, 7)),
    ]
    pack = make_pack(samples, range(6), "shared")
    before = run_of(model, reader, family, pack)
    assert len(pack.pieces) == 4 + 1 + 3
    for piece in pack.pieces:
        members = {piece.sample}
        if piece.parent is None:
            members = next({*b.members} for b in pack.rows[0] if piece.sample in b.members)
        changed = list(samples)
        place = piece.first if piece.parent is not None else 2
        for i in members:
            tokens = samples[i].tokens.copy()
            assert tokens[place] < 256
            tokens[place] = (tokens[place] + 1) % 256
            changed[i] = replace(samples[i], tokens=tokens)
        after = run_of(model, reader, family, make_pack(changed, range(6), "shared"))
        assert_only_these_differ(before, after, members)


@pytest.mark.parametrize("family", VISION)
def test_an_image_affects_only_the_responses_to_its_prompt(
    net: Make, reader: Make, group: Make, family: Family
) -> None:
    model = net(family, attention=OURS)
    groups = [group(family, 1, 1, (4, 3)), group(family, 2, 2, (5,)), group(family, 0, 3, (2, 7))]
    samples = [sample for members in groups for sample in members]
    before = run_of(model, reader, family, make_pack(samples, range(5), "shared"))
    for i, members in ((0, {0, 1}), (2, {2})):
        for number in range(len(samples[i].media)):
            changed = [repainted(s, number) if n in members else s for n, s in enumerate(samples)]
            after = run_of(model, reader, family, make_pack(changed, range(5), "shared"))
            assert_only_these_differ(before, after, members)


def repainted(sample: Sample, number: int) -> Sample:
    media: list[Any] = list(sample.media)
    media[number] = replace(media[number], seed=99)
    return replace(sample, media=tuple(media))


def assert_only_these_differ(before: Run, after: Run, members: set[int]) -> None:
    for i in range(len(before.logprobs)):
        gap = max(
            np.abs(mine[i] - other[i]).max()
            for mine, other in ((before.logprobs, after.logprobs), (before.values, after.values))
        )
        assert gap > 1e-4 if i in members else gap < 1e-6, (i, gap)


@pytest.mark.parametrize("attention", ["sdpa", OURS], ids=["sdpa", "ours"])
@pytest.mark.parametrize("family", VISION)
def test_the_length_of_a_neighbor_changes_nothing(
    net: Make, reader: Make, sample: Make, family: Family, attention: Attention
) -> None:
    model = net(family, attention=attention)
    before = [sample(family, images, seed) for seed, images in enumerate((1, 2, 0))]
    for changed in range(3):
        after = list(before)
        after[changed] = sample(family, (2, 0, 1)[changed], 77)
        first, second = (run_of(model, reader, family, make_pack(s, range(3), "packed")) for s in (before, after))
        for i in range(3):
            if i != changed:
                np.testing.assert_allclose(first.logprobs[i], second.logprobs[i], atol=1e-5)


# ---------------------------------------------------------------- planted faults


def two_dimensions(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = inputs["position_ids"][0]


def three_rows(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = inputs["position_ids"][1:]


def default_cache(inputs: dict[str, Any]) -> None:
    del inputs["use_cache"]


def no_plan(inputs: dict[str, Any]) -> None:
    del inputs["attention_plan"]


def no_parents(inputs: dict[str, Any]) -> None:
    inputs["attention_plan"] = plan_attention(
        tuple(span._replace(parent=None) for span in inputs["attention_plan"].spans), causal=True
    )


def responses_attend_to_each_other(inputs: dict[str, Any]) -> None:
    runs: list[Span] = []
    for span in inputs["attention_plan"].spans:
        if span.parent is None:
            runs.append(span._replace(parent=None))
        else:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + span.length)
    inputs["attention_plan"] = plan_attention(tuple(runs), causal=True)


def index_minus_one(inputs: dict[str, Any]) -> None:
    """Correct without shared prompts."""
    inputs["previous"] = inputs["scored"].flatten().nonzero()[:, 0] - 1


def positions_from_the_neighbor(inputs: dict[str, Any]) -> None:
    inputs["position_ids"][:, :, 1:] = inputs["position_ids"][:, :, :-1] + 1


PACKED_FAULTS = [(two_dimensions, "sdpa"), (three_rows, "sdpa"), (default_cache, "sdpa"), (no_plan, OURS)]
SHARED_FAULTS = [no_plan, no_parents, responses_attend_to_each_other, index_minus_one, positions_from_the_neighbor]
FAULTS: list[tuple[Callable[..., None], Attention, Layout]] = [
    *((fault, attention, "packed") for fault, attention in PACKED_FAULTS),
    *((fault, OURS, "shared") for fault in SHARED_FAULTS),
]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(("fault", "attention", "layout"), FAULTS)
def test_a_planted_fault_breaks_equality(
    net: Make, reader: Make, group: Make, family: Family, fault: Make, attention: Attention, layout: Layout
) -> None:
    model = net(family, attention=attention)
    padded, pack = (pack_of(group, family, "mixed", chosen) for chosen in ("padded", layout))
    expected = run_of(model, reader, family, padded)
    inputs = model_inputs(model, reader(family), pack)
    assert difference(run(model, inputs, pack), expected) < 1e-5
    fault(inputs)
    try:
        is_found = difference(run(model, inputs, pack), expected) > 1e-3
    except ConfigError as error:  # the mask is found to ignore the positions, before any output
        is_found = "lets packed samples attend to each other" in str(error)
    assert is_found


def test_images_that_attend_one_way_break_equality(
    net: Make, reader: Make, group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net("gemma3", attention=OURS)
    padded, shared = (pack_of(group, "gemma3", "mixed", layout) for layout in ("padded", "shared"))
    expected = run_of(net("gemma3"), reader, "gemma3", padded)
    assert difference(run_of(model, reader, "gemma3", shared), expected) < 1e-4
    monkeypatch.setattr(type(reader("gemma3")), "attends_both_ways", False)
    assert difference(run_of(model, reader, "gemma3", shared), expected) > 1e-2


# ---------------------------------------------------------------- images encoded once


def tower_of(model: PreTrainedModel) -> nn.Module:
    """Return the vision tower, without the projector of families that keep it apart."""
    towers = (getattr(model.model, name, None) for name in ("visual", "vision_tower", "vision_model"))
    return next(tower for tower in towers if tower is not None)


def count_images(model: PreTrainedModel) -> list[int]:
    """Count the images, or tiles, of each call of the vision tower, from now on."""
    calls: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "grid_thw" in kwargs or len(args) > 1:
            calls.append(len(kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]))
        else:
            calls.append(len(kwargs["pixel_values"]))

    tower_of(model).register_forward_pre_hook(count, with_kwargs=True)
    return calls


def num_encoded(inputs: dict[str, Any]) -> int:
    """Return the number of images, or tiles, that these inputs bring to the vision tower."""
    return int(inputs["image_tiles"].sum()) if "image_tiles" in inputs else len(inputs["image_grid_thw"])


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("family", VISION)
def test_an_image_goes_through_the_tower_once_for_all_its_samples(
    net: Make, reader: Make, group: Make, family: Family, layout: Layout
) -> None:
    one, two = group(family, 2, 1, (4, 7, 2)), group(family, 1, 2, (3, 5))
    # Another prompt has the same images in another order.
    other = group(family, 2, 3, (4,))
    swapped = other_media(reader(family), other[0], one[0].media[::-1])
    samples = [*one, *two, *group(family, 0, 4, (3,)), swapped]
    pack = make_pack(samples, range(7), layout)
    model = net(family, attention=OURS)
    inputs = model_inputs(model, reader(family), pack)
    assert len(inputs.get("image_grid_thw", inputs.get("image_tiles"))) == len(inputs["images"]) == 3
    assert len(inputs["image_places"]) == (2 + 1 + 2 if layout == "shared" else 3 * 2 + 2 * 1 + 2)
    calls = count_images(model)
    with torch.no_grad():
        together = Scorer(model)(inputs)
    assert calls == [num_encoded(inputs)]
    for i, (item, mine) in enumerate(zip(samples, collect(pack, together.logprobs), strict=True)):
        alone = make_pack([item], [0], "padded")
        with torch.no_grad():
            expected = Scorer(model)(model_inputs(model, reader(family), alone))
        np.testing.assert_allclose(mine, collect(alone, expected.logprobs)[0], atol=1e-5, err_msg=str(i))


def other_media(read: Any, sample: Sample, media: Sequence[Media]) -> Sample:
    shown = read.image_text() * len(media)
    prompt, _ = read.encode(f"these: {shown}", [item.size for item in media])
    response = sample.tokens[sample.sampled]
    tokens = np.concatenate([prompt, response])
    return replace(sample, tokens=tokens, sampled=np.arange(len(tokens)) >= len(prompt), media=tuple(media))


@pytest.mark.parametrize("family", VISION)
def test_cached_features_replace_the_tower(net: Make, reader: Make, group: Make, family: Family) -> None:
    model = net(family, attention=OURS)
    freeze(model, reader(family), vision=True, projector=True)
    pack = pack_of(group, family, "mixed", "shared")
    names = list(pack.media)

    def pass_with(features: dict[str, ImageFeatures] | None) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        inputs = model_inputs(model, reader(family), pack, cached=features or ())
        out = Scorer(model)(inputs, features=features)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        return out.logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, slopes = pass_with(None)
    features: dict[str, ImageFeatures] = {}
    calls = count_images(model)
    pass_with(features)
    assert list(features) == names
    assert {len(image.deepstack) for image in features.values()} == {1 if family.startswith("qwen3_vl") else 0}
    for known in (features, {name: features[name] for name in names[::2]}):
        output, gradients = pass_with(dict(known))
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
        assert gradients.keys() == slopes.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, slopes[name], atol=1e-5, rtol=1e-5)
    # All, none, and every second one.
    rest = model_inputs(model, reader(family), pack, cached=names[::2])
    assert calls == [num_encoded(model_inputs(model, reader(family), pack)), num_encoded(rest)]
    assert len(rest["images"]) == len(names) // 2
    swapped = dict(zip(names, [features[name] for name in names[::-1]], strict=True))
    same_size = {
        n: swapped[n] for n in names if len(swapped[n].rows) == len(features[n].rows) and swapped[n] is not features[n]
    }
    if same_size:
        assert (pass_with(features | same_size)[0] - expected).abs().max() > 1e-3


# ---------------------------------------------------------------- the wrapped model


def test_a_pack_without_sampled_tokens_has_zero_gradients(net: Make, reader: Make) -> None:
    model = net("qwen2_5_vl", attention=OURS)
    blank: Sample = reader("qwen2_5_vl").dummy_sample()
    pack = make_pack([blank], [-1], "shared")
    out = Scorer(model)(model_inputs(model, reader("qwen2_5_vl"), pack))
    (out.logprobs.sum() * 0).backward()
    touched = [name for name, p in model.named_parameters() if p.grad is not None]
    assert any("visual" in name for name in touched)
    assert all(p.grad.abs().max() == 0 for p in model.parameters() if p.grad is not None)


def test_parameters_keep_their_names_and_ties(net: Make) -> None:
    model = net("qwen3", tied=True)
    names = list(model.state_dict())
    scorer = Scorer(model)
    assert [name.removeprefix("net.") for name in scorer.state_dict()] == names
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_model_with_nonlinear_logits_is_refused(net: Make) -> None:
    model = net("llama")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        Scorer(model)
