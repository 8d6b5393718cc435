"""Values come from the right states in every layout, and files are compatible with Transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from vlmrl.data.packing import Pack, collect, make_pack
from vlmrl.errors import ConfigError
from vlmrl.models.attention import PACKED
from vlmrl.models.inputs import model_inputs, states_at
from vlmrl.models.load import load_model
from vlmrl.models.quantize import FourBit, is_four_bit
from vlmrl.models.scorer import ImageFeatures
from vlmrl.models.tiny import Family
from vlmrl.models.value_head import Scale, ScoreHead, ValueModel, save_value_model, value_net
from vlmrl.types import Floats, Layout, Sample

Make = Callable[..., Any]

FAMILIES: list[Family] = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text", "qwen3", "llama"]
TEXT: list[Family] = ["qwen3", "qwen3_5_text", "llama"]
OURS = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}


def read(path: Path, *, seed: int | None = 5, attention: Any = OURS, **options: Any) -> PreTrainedModel:
    return value_net(
        str(path), **{"dtype": torch.float32, "attn_implementation": attention, "head_seed": seed} | options
    )


@pytest.fixture
def value_model(folder: Make) -> Make:
    """`value_model(family)`: with larger weights than a new model has, so that attention matters."""

    def make(family: Family, attention: Any = OURS) -> ValueModel:
        net = read(folder(family), attention=attention)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return ValueModel(net.eval())

    return make


def samples_of(group: Make, family: Family) -> list[Sample]:
    """Two groups and a single sample; one response is empty, one has two turns, and images differ."""
    images = 0 if family in TEXT else 1
    rows: list[Sample] = [*group(family, images, 1, (4, 0, 7)), *group(family, 2 * images, 2, (3,))]
    rows += group(family, 0, 3, (6, 2))
    rows[4].sampled[-3:-1] = False
    return rows


def pack_of(samples: list[Sample], layout: Layout) -> Pack:
    return make_pack(samples, range(len(samples)), layout)


def last(sample: Sample) -> np.ndarray[Any, Any]:
    return np.arange(len(sample.tokens)) == len(sample.tokens) - 1


# ---------------------------------------------------------------- states of values


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokens_value_is_computed_from_the_state_before_it(
    value_model: Make, reader: Make, group: Make, family: Family
) -> None:
    model, samples = value_model(family), samples_of(group, family)
    pack = pack_of(samples, "shared")
    rows = collect(pack, model(model_inputs(model.net, reader(family), pack)).values)
    weight = model.net.score.weight[0]
    for sample, values in zip(samples, rows, strict=True):
        states = states_of(model.net, reader(family), sample)
        expected = np.zeros(len(sample.tokens), dtype=np.float32)
        for t in np.flatnonzero(sample.sampled):
            expected[t] = float(states[t - 1] @ weight)
        np.testing.assert_allclose(values, expected, atol=2e-5)
    assert np.abs(np.concatenate(rows)).max() > 0.5


@torch.no_grad()
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_is_computed_from_the_state_at_the_last_token(
    value_model: Make, reader: Make, group: Make, family: Family, layout: Layout
) -> None:
    model, samples = value_model(family), samples_of(group, family)
    pack = pack_of(samples, layout)
    positions = states_at(pack, [last(sample) for sample in samples])
    rows = collect(pack, model(model_inputs(model.net, reader(family), pack), positions=positions).values)
    expected = [float(states_of(model.net, reader(family), s)[-1] @ model.net.score.weight[0]) for s in samples]
    np.testing.assert_allclose([row[-1] for row in rows], expected, atol=2e-5)
    # The empty response is scored at the end of its shared prompt.
    assert len(samples[1].tokens) == samples[1].prompt_length
    assert np.ptp(expected) > 0.1


def states_of(net: PreTrainedModel, reader: Any, sample: Sample) -> Tensor:
    """[T, D] states of one sample by itself, from the plain Transformers model."""
    inputs = model_inputs(net, reader, make_pack([sample], [0], "padded"))
    known = ("input_ids", "position_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
    given = {name: inputs[name] for name in known if name in inputs}
    states: Tensor = net.base_model(**given, use_cache=False).last_hidden_state[0]
    return states


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_values_and_gradients_do_not_depend_on_the_layout(
    value_model: Make, reader: Make, group: Make, family: Family
) -> None:
    samples = samples_of(group, family)

    def run(layout: Layout) -> tuple[list[Floats], dict[str, Tensor]]:
        model, pack = value_model(family), pack_of(samples, layout)
        values = model(model_inputs(model.net, reader(family), pack)).values
        (values - 0.5).square().sum().backward()
        # In every layout, the weight of other tokens is zero.
        return collect(pack, values), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    values, gradients = run("padded")
    assert "net.score.weight" in gradients
    for layout in ("packed", "shared"):
        others, slopes = run(layout)
        assert slopes.keys() == gradients.keys()
        for one, other in zip(values, others, strict=True):
            np.testing.assert_allclose(other, one, atol=2e-5)
        for name, slope in slopes.items():
            scale = gradients[name].abs().max().clamp(min=1.0)
            assert float((slope - gradients[name]).abs().max() / scale) < 2e-5, name


@torch.no_grad()
def test_cached_features_replace_the_tower(value_model: Make, reader: Make, group: Make) -> None:
    model, pack = value_model("qwen3_vl"), pack_of(samples_of(group, "qwen3_vl"), "shared")
    features: dict[str, ImageFeatures] = {}
    first = model(model_inputs(model.net, reader("qwen3_vl"), pack), features=features).values
    assert features.keys() == pack.media.keys()
    again = model_inputs(model.net, reader("qwen3_vl"), pack, cached=features)
    assert "pixel_values" not in again
    assert torch.equal(model(again, features=features).values, first)


# ---------------------------------------------------------------- the head


def test_the_head_computes_in_fp32_in_models_of_any_dtype() -> None:
    linear = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    linear.weight.data = torch.tensor([[1.0, 2.0, 0.25]], dtype=torch.bfloat16)
    states = torch.tensor([[256.0, 1.0, 1.0], [0.0, 0.0, 4.0]], dtype=torch.bfloat16)
    values = ScoreHead.adopt(linear)(states)
    # In bf16 the first would be 258.
    assert values.dtype == torch.float32
    assert values.tolist() == [258.25, 1.0]


def test_two_labels_give_the_log_odds_of_the_second() -> None:
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.data = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    odds = ScoreHead.adopt(linear)(torch.tensor([[2.0, 1.0], [0.0, 1.0]]))
    assert odds.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_is_small_and_depends_on_its_seed_only(folder: Make, family: Family, tied: bool) -> None:
    path = folder(family, tied=tied)
    torch.manual_seed(0)
    first = read(path, seed=1)
    torch.manual_seed(7)
    second, other = read(path, seed=1), read(path, seed=2)
    assert torch.equal(first.score.weight, second.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    # A deviation of 1 / (D + 1); D is 64.
    assert first.score.weight.shape == (1, 64)
    assert 0.5 < float(first.score.weight.detach().std()) * 65 < 1.5
    assert first.score.bias is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_backbone_is_unchanged_and_has_no_output_layer(folder: Make, family: Family, tied: bool) -> None:
    path = folder(family, tied=tied)
    net = read(path)
    model = load_model(str(path), dtype=torch.float32, attn_implementation=OURS)
    ours, theirs = dict(net.base_model.named_parameters()), dict(model.base_model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    expected = [n for n, _ in model.named_parameters() if n != "lm_head.weight"]
    assert [name for name, _ in net.named_parameters()] == [*expected, "score.weight"]
    assert net.config.get_text_config()._attn_implementation == PACKED


@torch.no_grad()
def test_the_head_of_a_4_bit_model_is_not_quantized(folder: Make, reader: Make, tmp_path: Path) -> None:
    save_value_model(read(folder("qwen2_5_vl")), reader("qwen2_5_vl"), tmp_path)
    four_bit = FourBit(torch.uint8, reader("qwen2_5_vl").parameter_group)
    for path in (folder("qwen2_5_vl"), tmp_path):
        net = read(path, four_bit=four_bit)
        in_bits = [name for name, parameter in net.named_parameters() if is_four_bit(parameter)]
        assert in_bits
        assert all("language_model.layers" in name for name in in_bits)
        assert type(net.score) is nn.Linear
        assert torch.equal(net.score.weight, read(path).score.weight)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_loaded_again(folder: Make, reader: Make, tmp_path: Path, family: Family, tied: bool) -> None:
    net = read(folder(family, tied=tied))
    save_value_model(net, reader(family), tmp_path, scale=Scale(0.5, 2.0))
    again = read(tmp_path, seed=None)
    ours, theirs = net.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (again.config.mean, again.config.std, again.config.num_labels) == (0.5, 2.0, 1)
    # A critic that starts from a reward model keeps its head.
    assert torch.equal(read(tmp_path, seed=99).score.weight, net.score.weight)
    stored = load_file(tmp_path / "model.safetensors")
    base = load_file(folder(family, tied=tied) / "model.safetensors")
    assert stored.keys() == base.keys() - {"lm_head.weight"} | {"score.weight"}
    (architecture,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert architecture.endswith("ForSequenceClassification")


@torch.no_grad()
@pytest.mark.parametrize("family", TEXT)
def test_transformers_loads_saved_models_with_equal_scores(
    folder: Make, value_model: Make, reader: Make, group: Make, tmp_path: Path, family: Family
) -> None:
    model, samples = value_model(family), samples_of(group, family)
    save_value_model(model.net, reader(family), tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    pack = pack_of(samples, "shared")
    positions = states_at(pack, [last(sample) for sample in samples])
    rows = collect(pack, model(model_inputs(model.net, reader(family), pack), positions=positions).values)
    expected = [float(theirs(input_ids=torch.from_numpy(s.tokens)[None]).logits[0, 0]) for s in samples]
    np.testing.assert_allclose([row[-1] for row in rows], expected, atol=2e-5)


@torch.no_grad()
def test_a_classifier_of_transformers_is_a_reward_model(folder: Make, reader: Make, tmp_path: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(folder("qwen3"), num_labels=2)
    theirs.save_pretrained(tmp_path)
    net = read(tmp_path, seed=None)
    assert torch.equal(net.score.weight, theirs.score.weight)
    assert net.score.weight.shape == (2, 64)


def test_a_reward_model_without_a_score_layer_is_refused(folder: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"^reward\.model_name_or_path: .* has no score layer, .*name a model that has one$"
    ):
        read(folder("qwen2_5_vl"), seed=None, flag="reward.model_name_or_path")


def test_a_classifier_without_its_head_is_refused(folder: Make, reader: Make, tmp_path: Path) -> None:
    save_value_model(read(folder("qwen3")), reader("qwen3"), tmp_path)
    drop(tmp_path, "score.weight")
    with pytest.raises(ConfigError, match=r"lack the weight score\.weight: get them again"):
        read(tmp_path, seed=1)


def test_a_missing_weight_is_refused(folder: Make, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(folder("qwen2_5_vl"), path)
    drop(path, "model.norm.weight")
    with pytest.raises(
        ConfigError, match=r"^critic\.model_name_or_path: .* lack the weight model\.language_model\.norm"
    ):
        read(path, flag="critic.model_name_or_path")


def test_more_than_two_labels_are_refused(folder: Make, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(folder("qwen3"), num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="score layer of 3 labels: use one of 1 or 2"):
        read(tmp_path)


def test_a_missing_folder_is_named_with_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^critic\.model_name_or_path: there is no folder /nowhere/model$"):
        read(Path("/nowhere/model"), flag="critic.model_name_or_path")


def drop(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
