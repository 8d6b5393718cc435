"""Ranks that share the tokens of a pack compute what one rank does."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from forked_ranks import on_ranks
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.algorithms.load_balance import load_balance_loss
from vlmrl.data.packing import Pack, make_pack, place
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.attention import PACKED
from vlmrl.models.experts import RouterLogits, use_experts
from vlmrl.models.inputs import model_inputs, states_at
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.models.sequence import SequenceGroup, SequenceShard, check_sequence_parallel, sliced_inputs, sum_once
from vlmrl.models.tiny import Family
from vlmrl.models.value_head import ValueModel, value_net
from vlmrl.types import Layout, Sample

Make = Callable[..., Any]

OURS = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}
PLAN = "attention_plan"
FAMILIES: list[Family] = ["qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe"]
OTHERS: list[Family] = ["gemma3", "internvl", "glm4v"]
LAYOUTS: list[Layout] = ["packed", "shared", "padded"]


class Run(NamedTuple):
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def world() -> SequenceGroup:
    group = torch.distributed.group.WORLD
    assert group is not None
    return SequenceGroup(group, torch.distributed.get_rank(), torch.distributed.get_world_size())


def pack_of(group: Make, family: Family, layout: Layout, parity: int) -> Pack:
    """Groups with no image, one and three, in rows of an even or odd number of tokens."""
    images = 1 if "_vl" in family else 0
    for extra in (0, 1):
        samples = [
            *group(family, 0, 1, (5, 2, 9)),
            *group(family, images, 2, (4,)),
            *group(family, 3 * images, 3, (3, 12 + extra)),
        ]
        pack = make_pack(samples, range(len(samples)), layout)
        if pack.shape[1] % 2 == parity:
            return pack
    raise AssertionError(f"no {layout} pack of parity {parity}")


def scored(net: PreTrainedModel, inputs: dict[str, Any], sequence: SequenceGroup | None) -> Run:
    """A pass whose loss squares the log-prob of each row: that of a token depends on others, as a response's does."""
    out = Scorer(net, sequence)(dict(inputs), temperature=0.7, banned=(7, 300))
    loss = (0.1 * out.entropy.sum(-1) - out.logprobs.sum(-1).square() / 100).sum() / inputs["scored"].sum()
    return differentiated(net, loss, [out.logprobs, out.entropy])


def valued(
    net: PreTrainedModel, inputs: dict[str, Any], sequence: SequenceGroup | None, positions: dict[str, Tensor] | None
) -> Run:
    """The same with a value head."""
    out = ValueModel(net, sequence)(dict(inputs), positions=positions)
    return differentiated(net, out.values.sum().square(), [out.values])


def differentiated(net: PreTrainedModel, loss: Tensor, outputs: list[Tensor]) -> Run:
    net.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return Run([values.detach() for values in outputs], gradients)


def difference(runs: list[Run], expected: Run) -> float:
    """How far every rank's outputs are from those of one rank, and the sum of their gradients from its gradient."""
    gaps = [
        float((mine - other).abs().max())
        for run in runs
        for mine, other in zip(run.outputs, expected.outputs, strict=True)
    ]
    for run in runs:
        # ZeRO reduces the gradient of a parameter when all ranks have one.
        assert run.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        total = torch.stack([run.gradients[name] for run in runs]).sum(0)
        gaps.append(float((total - gradient).abs().max() / gradient.abs().max().clamp(min=1.0)))
    return max(gaps)


def in_fp64(net: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64, with larger weights, so that attention matters. Its norms and its tower compute in fp32."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    use_experts(net, "eager")  # the default has no fp64
    return net.double().eval()


def compare(
    folder: Path, size: int, work: Callable[[SequenceGroup | None], list[Run]], *, tolerance: float = 1e-8
) -> None:
    folder.mkdir()
    expected = work(None)
    by_rank = on_ranks(size, lambda: work(world()), folder)
    for number, run in enumerate(expected):
        assert difference([of_rank[number] for of_rank in by_rank], run) < tolerance, number


# Models of 4 heads and 2 key heads: four ranks repeat the key heads.
@pytest.mark.parametrize(
    ("family", "size", "layouts", "tolerance"),
    [
        *((family, 2, LAYOUTS, 1e-8) for family in FAMILIES),
        *((family, 4, ["shared"], 1e-8) for family in FAMILIES),
        # Some of their norms compute in fp32.
        *((family, 2, ["shared", "padded"], 1e-6) for family in OTHERS),
    ],
)
def test_log_probs_and_gradients_are_those_of_one_rank(
    reader: Make, group: Make, tmp_path: Path, family: Family, size: int, layouts: list[Layout], tolerance: float
) -> None:
    path = tiny.build(family, tmp_path / family, size="tiny")
    net = in_fp64(load_model(str(path), dtype=torch.float32, attn_implementation=OURS))
    packs = [pack_of(group, family, layout, parity) for layout in layouts for parity in (0, 1)]
    cases = [model_inputs(net, reader(family), pack) for pack in packs]

    def work(sequence: SequenceGroup | None) -> list[Run]:
        return [scored(net, inputs, sequence) for inputs in cases]

    compare(tmp_path / "ranks", size, work, tolerance=tolerance)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_videos_are_shared_like_images(reader: Make, group: Make, net: Make, tmp_path: Path, family: Family) -> None:
    model, processor = in_fp64(net(family, attention=OURS)), reader(family)
    only = group(family, 0, 1, (9, 4), videos=1)
    mixed = [*group(family, 2, 2, (5, 3), videos=2), *group(family, 0, 3, (6,)), *group(family, 1, 4, (7,))]
    packs = [make_pack(samples, range(len(samples)), layout) for samples in (only, mixed) for layout in LAYOUTS]
    width = -(-packs[2].shape[1] // 2)
    is_video = processor.token_types(only[0].tokens) == 2
    assert is_video[:width].any(), "the video begins on the first rank"
    assert is_video[width:].any(), "and ends on the second"
    inputs = [model_inputs(model, processor, pack) for pack in packs]

    def work(sequence: SequenceGroup | None) -> list[Run]:
        return [scored(model, each, sequence) for each in inputs]

    compare(tmp_path / "ranks", 2, work)


def test_a_value_head_a_recomputed_pass_and_a_rank_without_a_scored_token(
    reader: Make, group: Make, folder: Make, net: Make, tmp_path: Path
) -> None:
    family: Family = "qwen3_vl"
    value = value_net(str(folder(family)), dtype=torch.float32, attn_implementation=OURS, head_seed=0)
    value = in_fp64(value)
    recomputed = in_fp64(net(family, attention=OURS)).train()
    recomputed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pack = pack_of(group, family, "shared", 1)
    (short,) = group(family, 3, 1, (2,))
    late = make_pack([short], [0], "packed")
    assert not any(short.sampled[: len(short.tokens) // 2 + 1])

    def work(sequence: SequenceGroup | None) -> list[Run]:
        inputs = [model_inputs(value, reader(family), each) for each in (pack, late)]
        ends = states_at(pack, [np.arange(len(item.tokens)) == len(item.tokens) - 1 for item in pack.samples])
        return [
            *(valued(value, each, sequence, None) for each in inputs),
            # The scores of a reward model.
            valued(value, inputs[0], sequence, ends),
            *(scored(recomputed, each, sequence) for each in inputs),
        ]

    compare(tmp_path / "ranks", 2, work)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_load_balance_loss_and_replayed_experts_too(
    reader: Make, group: Make, net: Make, tmp_path: Path, layout: Layout
) -> None:
    """Each rank routes its own tokens: the loss adds up their choices, and each takes its tokens' recorded experts."""
    family: Family = "qwen3_vl_moe"
    model = in_fp64(net(family, attention=OURS))
    pack = pack_of(group, family, layout, 1)
    rng = np.random.default_rng(0)

    def record(sample: Sample) -> Sample:
        chosen = rng.permuted(np.tile(np.arange(4), (len(sample.tokens) - 1, 2, 1)), axis=-1)
        return dataclasses.replace(sample, experts=chosen[:, :, :2].astype(np.int16))

    pack = dataclasses.replace(pack, samples=tuple(map(record, pack.samples)))
    inputs = model_inputs(model, reader(family), pack, replays_experts=True)
    is_token = place(pack, [np.ones(len(sample.tokens), dtype=np.bool_) for sample in pack.samples], False)

    def work(sequence: SequenceGroup | None) -> list[Run]:
        hooked = copy.deepcopy(model)
        recorder, scorer = RouterLogits(hooked, sequence), Scorer(hooked, sequence)
        out = scorer(dict(inputs))
        logits, own = recorder.take(is_token)
        add_up = None if sequence is None else partial(sum_once, group=sequence)
        loss = load_balance_loss(logits, own, top_k=recorder.top_k, add_up=add_up)
        counts = scorer.take_replay_counts()
        return [differentiated(hooked, loss + out.logprobs.square().mean(), [loss, out.logprobs, counts])]

    compare(tmp_path / "ranks", 2, work, tolerance=2e-6)


def test_a_core_that_ignores_the_plan_mixes_samples(reader: Make, group: Make, net: Make, tmp_path: Path) -> None:
    """Why `sdpa` is refused: without the plan, the whole row is one sample."""
    family: Family = "qwen3"
    model = in_fp64(net(family, attention=OURS))
    pack = pack_of(group, family, "packed", 0)
    inputs = model_inputs(model, reader(family), pack)

    def work(sequence: SequenceGroup | None) -> list[Run]:
        each = dict(inputs)
        if sequence is not None:
            del each["attention_plan"]
        return [scored(model, each, sequence)]

    with pytest.raises(AssertionError, match="0"):
        compare(tmp_path / "ranks", 2, work, tolerance=0.1)


def test_a_model_whose_attention_does_not_exchange_tokens_is_refused(
    reader: Make, group: Make, net: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    family: Family = "qwen3"
    model = net(family, attention=OURS)
    inputs = model_inputs(model, reader(family), pack_of(group, family, "packed", 0))
    # One of the two layers does not pass the shard on.
    layer = model.model.layers[1]
    forward = layer.forward

    def drops_shard(*states: Tensor, **others: Any) -> Any:
        return forward(*states, **{n: other for n, other in others.items() if n not in ("sequence_shard", PLAN)})

    monkeypatch.setattr(layer, "forward", drops_shard)
    monkeypatch.setattr(SequenceShard, "_exchange", lambda self, chunks: chunks)
    with pytest.raises(ConfigError, match="1 of the 2 layers of Qwen3ForCausalLM attend to the tokens of other ranks"):
        Scorer(model, SequenceGroup(None, 0, 2))(inputs)  # type: ignore[arg-type]


# ---------------------------------------------------------------- slices, by hand


def shard(rank: int, size: int, length: int) -> SequenceShard:
    return SequenceShard(SequenceGroup(None, rank, size), length)  # type: ignore[arg-type]


def test_five_columns_on_three_ranks_are_two_two_and_one_with_padding() -> None:
    row = torch.tensor([[1, 2, 3, 4, 5]])
    assert [shard(rank, 3, 5).take(row, 1).tolist() for rank in range(3)] == [[[1, 2]], [[3, 4]], [[5, 0]]]
    # Five columns on four ranks: the last has padding only.
    assert [shard(rank, 4, 5).take(row, 1).tolist() for rank in range(4)] == [[[1, 2]], [[3, 4]], [[5, 0]], [[0, 0]]]


def test_states_belong_to_the_rank_of_their_column() -> None:
    # Two rows of five tokens on two ranks of three columns: states 1 and 3 of row 0, state 4 of row 1.
    index = torch.tensor([1, 3, 9])
    is_own, places = shard(0, 2, 5).owned(index)
    assert (is_own.tolist(), places.tolist()) == ([True, False, False], [1])
    is_own, places = shard(1, 2, 5).owned(index)
    # Row 0 column 3 is the first of the slice; row 1 column 4 is the second of the slice's second row.
    assert (is_own.tolist(), places.tolist()) == ([False, True, True], [0, 4])


def test_features_of_deeper_layers_follow_their_tokens() -> None:
    is_image = torch.tensor([[False, True, True, False], [True, False, False, True]])
    level = torch.tensor([[10.0], [11.0], [12.0], [13.0]])
    sliced = [
        shard(rank, 2, 4).inputs({"visual_pos_masks": is_image, "deepstack_visual_embeds": [level]}) for rank in (0, 1)
    ]
    assert [part["visual_pos_masks"].tolist() for part in sliced] == [
        [[False, True], [True, False]],
        [[True, False], [False, True]],
    ]
    assert [part["deepstack_visual_embeds"][0][:, 0].tolist() for part in sliced] == [[10.0, 12.0], [11.0, 13.0]]


# ---------------------------------------------------------------- refused


def test_heads_that_do_not_divide_are_refused_by_name(net: Make) -> None:
    # A micro model has two heads.
    check_sequence_parallel(net("qwen3", attention=OURS), 2)
    with pytest.raises(ConfigError, match="the 2 attention heads of Qwen3ForCausalLM: use one of 1, 2"):
        check_sequence_parallel(net("qwen3", attention=OURS), 3)


def test_each_rank_drops_out_by_its_own_numbers_and_leaves_the_common_ones(net: Make) -> None:
    model = net("qwen3", attention=OURS)

    def two_passes(rank: int) -> tuple[list[float], float]:
        torch.manual_seed(3)
        drawn = []
        for _ in range(2):
            with sliced_inputs(model, SequenceShard(SequenceGroup(None, rank, 2), 8)):  # type: ignore[arg-type]
                drawn.append(torch.rand(()).item())
        return drawn, torch.rand(()).item()

    (first, after), (second, also_after) = two_passes(0), two_passes(1)
    assert len({*first, *second}) == 4
    assert after == also_after
    assert two_passes(1) == (second, after)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_positions_that_depend_on_the_longest_sequence_are_refused(net: Make, rope_type: str) -> None:
    model = net("qwen3", attention=OURS)
    model.config.rope_parameters = {"rope_type": rope_type, "factor": 2.0}
    with pytest.raises(ConfigError, match=rf"positions of Qwen3ForCausalLM \({rope_type}\) depend on the longest"):
        check_sequence_parallel(model, 2)
    model.config.rope_parameters = {"full_attention": {"rope_type": rope_type}, "sliding_attention": {}}
    with pytest.raises(ConfigError, match=rope_type):
        check_sequence_parallel(model, 2)


def test_other_attention_and_recurrent_layers_are_refused_by_name(net: Make) -> None:
    with pytest.raises(ConfigError, match=r"needs ds\.attn_implementation auto"):
        check_sequence_parallel(net("qwen3", attention="sdpa"), 2)
    model = net("qwen3", attention=OURS)
    type_of = type(model)
    recurrent = type("Mamba", (type_of,), {"_is_stateful": True})
    model.__class__ = recurrent
    with pytest.raises(ConfigError, match="Mamba has recurrent layers"):
        check_sequence_parallel(model, 2)
