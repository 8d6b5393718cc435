"""Reward models: scores of responses and of their steps, and refused models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import FILLER, Pack, make_pack
from vlmrl.data.step_ends import StepBoundaries
from vlmrl.errors import ConfigError
from vlmrl.learning.reward_model import RewardModel
from vlmrl.learning.settings import RewardModelSettings
from vlmrl.models import tiny
from vlmrl.models.inputs import model_inputs
from vlmrl.models.value_head import Scale, ValueModel, save_value_model, value_net
from vlmrl.observe.metrics import Sum
from vlmrl.plugins import Processor, processor
from vlmrl.types import Layout, Sample

torch.set_num_threads(1)

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")


def read(path: Path) -> Processor:
    return processor(str(path), min_pixels=3136, max_pixels=100_000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folders("qwen3")`: a model in `base`, a reward model in `scorer`, and one without its scale in `unscaled`."""

    def make(family: Any) -> Path:
        out = tmp_path_factory.getbasetemp() / f"reward_model_{family}"
        if not out.exists():
            base = tiny.build(family, out / "base", size="micro")
            net = value_net(str(base), dtype=torch.float32, attn_implementation="sdpa", head_seed=0)
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            save_value_model(net, read(base), out / "unscaled")
            save_value_model(net, read(base), out / "scorer", scale=Scale(0.5, 2.0))
        return out

    return make


def start(folder: Path, *, name: str = "scorer", actor: Path | None = None, **options: Any) -> RewardModel:
    settings: dict[str, Any] = {
        "path": str(folder / name),
        "flag": "reward.model_name_or_path",
        "actor": Model(model_name_or_path=str(actor or folder / "base")),
        "ds": Ds(param_dtype="fp32", zero_stage=0),
        "loop": Loop(),
        "columns": Columns(min_pixels=3136, max_pixels=100_000),
        "vision": Vision(),
    }
    return RewardModelSettings(**settings | options).build()


def samples_of(reader: Processor) -> list[Sample]:
    """Responses to two prompts, one of them empty, with an image if the model takes images."""
    rng = np.random.default_rng(0)
    side = reader.resize_factor or 1
    rows = []
    for group, lengths in enumerate([(5, 0, 8), (3, 6)]):
        media = ()
        if reader.resize_factor is not None and group == 0:
            media = (InlineMedia("a", (2 * side, 3 * side), rng.integers(0, 256, (3 * side, 2 * side, 3), np.uint8)),)
        shown = "<|vision_start|><|image_pad|><|vision_end|>" * len(media)
        prompt, _ = reader.encode(f"{group}: {shown}?", [item.size for item in media])
        for length in lengths:
            tokens = np.concatenate([prompt, rng.integers(97, 122, length)])
            rows.append(Sample(tokens, np.arange(len(tokens)) >= len(prompt), media, group, f"test:{group}"))
    return rows


def packs_of(samples: list[Sample], layout: Layout) -> list[Pack]:
    """Two packs, one with a filler."""
    ids = list(range(len(samples)))
    return [make_pack([*samples[:3], samples[0]], [*ids[:3], FILLER], layout), make_pack(samples[3:], ids[3:], layout)]


def expected_scores(folder: Path, samples: list[Sample]) -> list[float]:
    """Score the last state of each sample by itself, with the plain Transformers model."""
    net = value_net(str(folder / "scorer"), dtype=torch.float32, attn_implementation="sdpa", head_seed=None).eval()
    reader = read(folder / "scorer")
    scores = []
    for sample in samples:
        inputs = model_inputs(net, reader, make_pack([sample], [0], "padded"))
        known = ("input_ids", "position_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
        with torch.no_grad():
            states = net.base_model(**{n: inputs[n] for n in known if n in inputs}, use_cache=False).last_hidden_state
            scores.append(float(states[0, -1] @ net.score.weight[0]))
    return scores


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])
def test_a_score_comes_from_the_last_token_in_every_layout(folders: Callable[[str], Path], family: str) -> None:
    folder = folders(family)
    samples, model = samples_of(read(folder / "base")), start(folder)
    expected = expected_scores(folder, samples)
    assert np.ptp(expected) > 0.1
    for layout in LAYOUTS:
        scores, counts = model.score(packs_of(samples, layout))
        assert [i for i, _ in scores] == [0, 1, 2, 3, 4]
        np.testing.assert_allclose([score for _, score in scores], expected, atol=2e-5)
        assert counts.keys() == {"vision/tower_calls", "vision/cache_hits"}


def test_an_image_is_encoded_once(folders: Callable[[str], Path]) -> None:
    folder = folders("qwen2_5_vl")
    samples, model = samples_of(read(folder / "base")), start(folder)
    assert model.score(packs_of(samples, "shared"))[1] == {"vision/tower_calls": Sum(1), "vision/cache_hits": Sum(0)}
    assert model.score(packs_of(samples, "shared"))[1] == {"vision/tower_calls": Sum(0), "vision/cache_hits": Sum(1)}


def test_scores_are_normalized_by_the_models_scale(folders: Callable[[str], Path]) -> None:
    folder = folders("qwen3")
    samples = samples_of(read(folder / "base"))
    scores, _ = start(folder, normalize=True).score(packs_of(samples, "shared"))
    expected = (np.array(expected_scores(folder, samples)) - 0.5) / 2.0
    np.testing.assert_allclose([score for _, score in scores], expected, atol=2e-5)


def test_normalizing_without_a_scale_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.normalize_enable: config\.json of .* holds no mean and std"):
        start(folders("qwen3"), name="unscaled", normalize=True)


def test_offloaded_weights_give_the_same_scores(folders: Callable[[str], Path]) -> None:
    folder = folders("qwen3")
    packs = packs_of(samples_of(read(folder / "base")), "shared")
    assert start(folder, offload=True).score(packs)[0] == start(folder).score(packs)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_scores_are_probabilities_divided_by_the_number_of_steps(
    folders: Callable[[str], Path], layout: Layout
) -> None:
    folder = folders("qwen3")
    reader, model = read(folder / "base"), start(folder, separator=";")
    prompt, _ = reader.encode("add;", [])
    # ";" is 59. Three steps, one step without a separator, and none.
    responses = [[97, 59, 98, 98, 59, 99], [97, 98], []]
    samples = [
        Sample(np.array([*prompt, *response]), np.arange(len(prompt) + len(response)) >= len(prompt), (), 0, "test:0")
        for response in responses
    ]
    rows, _ = model.step_scores([make_pack(samples, range(3), layout)])
    scores = [row[len(prompt) :] for _, row in rows]
    assert [list(np.flatnonzero(row)) for row in scores] == [[1, 4, 5], [1], []]
    assert not any(row[: len(prompt)].any() for _, row in rows)
    # `score` of a prefix is the log-odds at the end of its last step.
    prefixes = [samples[0].tokens[: len(prompt) + n] for n in (2, 5, 6)]
    whole = [replace(samples[0], tokens=t, sampled=samples[0].sampled[: len(t)]) for t in prefixes]
    odds, _ = model.score([make_pack(whole, range(3), "padded")])
    expected = [1 / (1 + np.exp(-score)) / 3 for _, score in odds]
    np.testing.assert_allclose(scores[0][[1, 4, 5]], expected, atol=1e-5)
    assert float(scores[0].sum()) == pytest.approx(3 * float(np.mean(expected)), abs=1e-5)


# ---------------------------------------------------------------- where steps end


def ends(folders: Callable[[str], Path], separator: str, *runs: list[str], merged: str | None = None) -> list[int]:
    """Positions after a prompt of three tokens where steps end. Two tokens of the environment follow each run."""
    reader = read(folders("qwen3") / "base")
    if merged is not None:
        reader.tokenizer.add_tokens([merged])
    tokens, sampled = [97, 98, 99], [False] * 3
    for run in runs:
        ids = [reader.tokenizer.convert_tokens_to_ids(_name(token)) for token in run]
        tokens += [*ids, 100, 100]
        sampled += [True] * len(ids) + [False] * 2
    sample = Sample(np.array(tokens), np.array(sampled))
    return [int(place) - 3 for place in np.flatnonzero(StepBoundaries(reader, separator).ends(sample))]


def _name(token: str) -> str:
    """Byte-level vocabularies have special letters for whitespace."""
    return token if len(token) > 1 else token.replace("\n", "Ċ").replace(" ", "Ġ")


def test_a_step_ends_with_the_last_token_of_its_separator(folders: Callable[[str], Path]) -> None:
    assert ends(folders, "\n\n", ["a", "\n", "b", "\n", "\n", "c", "<|im_end|>"]) == [4, 6]


def test_a_separator_may_lie_within_a_token(folders: Callable[[str], Path]) -> None:
    assert ends(folders, "\n\n", ["a", ".\n\n", "b", "<|im_end|>"], merged=".\n\n") == [1, 3]


def test_a_response_that_ends_with_a_separator_has_no_empty_last_step(folders: Callable[[str], Path]) -> None:
    assert ends(folders, ";", ["a", ";", "b", ";", "\n", "<|im_end|>"]) == [1, 3]


def test_every_turn_of_the_policy_ends_a_step_and_environment_tokens_end_none(folders: Callable[[str], Path]) -> None:
    # The environment's tokens are "d", twice after each turn.
    assert ends(folders, "d", ["a", "d", "b"], ["c"]) == [1, 2, 5]


def test_a_special_token_can_be_the_separator(folders: Callable[[str], Path]) -> None:
    assert ends(folders, "<|im_start|>", ["a", "<|im_start|>", "b", "<|im_start|>", "<|im_end|>"]) == [1, 3]


def test_a_response_of_only_the_end_token_is_one_step(folders: Callable[[str], Path]) -> None:
    assert ends(folders, ";", ["<|im_end|>"]) == [0]


def test_a_separator_whose_characters_are_split_by_tokens_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"^reward\.process_separator 'é': the model's tokens split one of its characters"
    ):
        ends(folders, "é", ["a"])


# ---------------------------------------------------------------- refused models


def test_a_model_with_other_tokens_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("qwen3")
    reader = read(folder / "base")
    net = value_net(str(folder / "scorer"), dtype=torch.float32, attn_implementation="sdpa", head_seed=None)
    reader.tokenizer.add_tokens(["more"])
    save_value_model(net, reader, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^reward\.model_name_or_path: .* reads other tokens than .* serve-rm"):
        start(folder, path=str(tmp_path / "other"))


def test_a_model_with_other_image_processing_is_refused(folders: Callable[[str], Path]) -> None:
    # Same tokens, larger patches.
    with pytest.raises(ConfigError, match=r"reads other images than"):
        start(folders("qwen3_vl"), actor=folders("qwen2_5_vl") / "base")


def test_a_model_without_a_score_layer_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.model_name_or_path: .* has no score layer"):
        start(folders("qwen3"), name="base")


def test_a_reward_model_that_does_not_exist_is_named_with_its_flag(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.model_name_or_path: there is no folder /nowhere/scorer$"):
        start(folders("qwen3"), path="/nowhere/scorer")


def test_all_parameters_are_frozen(folders: Callable[[str], Path]) -> None:
    module: ValueModel = start(folders("qwen3"))._value_model
    assert not any(parameter.requires_grad for parameter in module.parameters())
