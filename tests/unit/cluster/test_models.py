"""Models over ranks: packs, sums of metrics, and results in the order of the samples."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scripted_episodes import make_segment
from torch import Tensor

from vlmrl.algorithms.aggregation import reduce
from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss, policy_loss
from vlmrl.cluster.models import (
    PackingPlan,
    PassMetrics,
    PolicyWithoutAdapter,
    Ranks,
    RemoteCritic,
    RemotePolicy,
    RemoteReference,
    StepPlan,
    loss_totals,
    minibatches,
    pack_experience,
)
from vlmrl.cluster.remote_call import record_call
from vlmrl.data.experience import Experience
from vlmrl.data.media import Blank
from vlmrl.data.packing import Branch, Pack, make_pack, place
from vlmrl.observe.metrics import Metric, Sum
from vlmrl.types import Floats, Layout, Sample, Totals

dot = partial(Blank, size=(28, 28))


def sample(group: int, length: int = 3, sampled: int = 2) -> Sample:
    flags = np.arange(length) >= length - sampled
    return Sample(tokens=np.arange(length), sampled=flags, group=group)


def packing(layout: Layout = "shared", max_tokens: int = 100) -> PackingPlan:
    return PackingPlan(layout, max_tokens, max_samples=None, image_cost=lambda image: 10.0, filler=None)


class FakeRanks:
    """Ranks whose log-probs of a sample are its tokens, with one call of the tower per pack."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[tuple[int, list[Pack], dict[str, Any]]] = []

    def __len__(self) -> int:
        return self.number

    def _call(self, rank: int, function: Any, item: Any) -> Any:
        method, args, kwargs = record_call(function, item)
        if method == "update":
            work, totals = args
            return [
                {"policy/loss": Sum(1.0), "vision/tower_calls": Sum(len(packs))}
                for packs, _ in zip(work, totals, strict=True)
            ]
        assert method == "logprobs"
        (packs,) = args
        self.calls.append((rank, packs, dict(kwargs)))
        rows: list[tuple[int, Floats]] = []
        for pack in packs:
            rows += [(i, s.tokens.astype(np.float32)) for i, s in zip(pack.ids, pack.samples, strict=True) if i >= 0]
        counts: dict[str, Metric] = {"vision/tower_calls": Sum(len(packs))}
        return rows[::-1], counts

    def each(self, function: Any, items: list[Any]) -> list[Any]:
        return [self._call(rank, function, item) for rank, item in enumerate(items)]


class FakeCritic(FakeRanks):
    """A critic whose values are the tokens of a sample plus one."""

    def _call(self, rank: int, function: Any, item: Any) -> Any:
        method, args, _ = record_call(function, item)
        assert method in ("values", "update_values")
        if method == "update_values":
            work, totals = args
            return [{"value/loss": Sum(float(total.num_tokens))} for _, total in zip(work, totals, strict=True)]
        rows = [(i, s.tokens + 1.0) for pack in args[0] for i, s in zip(pack.ids, pack.samples, strict=True) if i >= 0]
        return rows, {}


def rows_passed(group: FakeRanks) -> list[tuple[tuple[Branch, ...], ...]]:
    return [pack.rows for _, packs, _ in group.calls for pack in packs]


def remote(group: Any, pass_metrics: PassMetrics, *, max_tokens: int = 100) -> RemoteReference:
    return RemoteReference(Ranks(group, packing(), max_tokens, pass_metrics))


def policy(group: Any, pass_metrics: PassMetrics) -> RemotePolicy:
    return RemotePolicy(Ranks(group, packing(), 100, pass_metrics), StepPlan(batch_size=4, epochs=1, seed=0))


def test_each_epoch_has_all_samples_in_another_order() -> None:
    samples = [sample(number, 4) for number in range(16)]
    columns = [np.zeros(4, np.float32)] * 16
    experience = Experience(samples, advantages=columns, old_logprobs=columns, rollout_logprobs=columns)
    steps = StepPlan(batch_size=4, epochs=2, seed=-1).split(experience, 3)
    orders = [[s.group for part in epoch for s in part.samples] for epoch in (steps[:4], steps[4:])]
    assert [len(part.samples) for part in steps] == [4] * 8
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(16))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_results_are_in_the_order_of_the_samples(num_ranks: int) -> None:
    samples = [sample(group, length) for group, length in ((0, 5), (1, 3), (0, 4), (2, 6), (1, 7))]
    logprobs = remote(FakeRanks(num_ranks), PassMetrics()).logprobs(samples)
    assert [row.tolist() for row in logprobs] == [s.tokens.tolist() for s in samples]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_undivided_samples_share_their_prompts_on_all_ranks(num_ranks: int) -> None:
    samples = [sample(group, 5) for group in (0, 0, 1, 1)]
    group = FakeRanks(num_ranks)
    logprobs = policy(group, PassMetrics()).logprobs(samples, undivided=True)
    assert [row.tolist() for row in logprobs] == [s.tokens.tolist() for s in samples]
    assert len({str(packs[0].rows) for _, packs, _ in group.calls}) == 1, "collectives stay in step"
    assert [[branch.members for row in packs[0].rows for branch in row] for _, packs, _ in group.calls] == [
        [(0, 1), (2, 3)]
    ] * num_ranks
    assert [[i >= 0 for pack in packs for i in pack.ids] for _, packs, _ in group.calls] == [
        [rank == 0] * 4 for rank in range(num_ranks)
    ]


def test_layout_and_gradient_arguments_reach_the_ranks() -> None:
    group = FakeRanks(1)
    remote_policy = policy(group, PassMetrics())
    samples = [sample(0, 3, 1), sample(0, 4, 2)]
    remote_policy.logprobs(samples)
    remote_policy.logprobs(samples, layout="padded", gradient=True)
    assert rows_passed(group) == [((Branch((0, 1), 2),),), ((Branch((0,), 0),), (Branch((1,), 0),))]
    assert [kwargs["gradient"] for _, _, kwargs in group.calls] == [False, True]


def test_a_reference_on_the_policys_ranks_has_the_adapter_off() -> None:
    group = FakeRanks(1)
    trained = policy(group, PassMetrics())
    PolicyWithoutAdapter(trained).logprobs([sample(0)])
    trained.logprobs([sample(0)])
    assert [kwargs["adapter"] for _, _, kwargs in group.calls] == [False, True]


def test_values_are_in_the_order_of_the_samples_and_updates_use_the_totals_of_the_step() -> None:
    critic = RemoteCritic(Ranks(FakeCritic(2), packing(), 100, PassMetrics()), StepPlan(4, epochs=1, seed=0))  # type: ignore[arg-type]
    samples = [sample(group, length) for group, length in ((0, 5), (1, 3), (0, 4))]
    assert [row.tolist() for row in critic.values(samples)] == [(s.tokens + 1.0).tolist() for s in samples]
    columns = [np.zeros(len(s.tokens), dtype=np.float32) for s in samples]
    experience = Experience(samples, columns, columns, columns, values=columns, returns=columns)
    # Two sampled tokens of each of three samples; both ranks get the total.
    assert critic.update(experience, step=1) == {"value/loss": 2 * 6.0}


def test_forward_passes_have_their_own_token_budget() -> None:
    group = FakeRanks(1)
    # Together 2 + 1 + 2 tokens.
    for max_tokens, number in ((5, 1), (4, 2)):
        group.calls.clear()
        remote(group, PassMetrics(), max_tokens=max_tokens).logprobs([sample(0, 3, 1), sample(0, 4, 2)])
        assert len(rows_passed(group)) == number


def test_an_image_counts_towards_the_budget() -> None:
    shown = [Sample(np.arange(3), np.arange(3) > 1, (dot(str(n)),), n) for n in range(2)]
    for max_tokens, number in ((26, 1), (25, 2)):
        (packs,) = packing(max_tokens=max_tokens).spread(shown, 1)
        assert len(packs) == number


def test_metrics_of_all_passes_of_a_step_are_reported_once() -> None:
    metrics, group = PassMetrics(), FakeRanks(2)
    ranks, reference = policy(group, metrics), remote(group, metrics)
    samples = [sample(0), sample(0), sample(1), sample(1)]
    columns = [np.zeros(3, dtype=np.float32)] * 4
    experience = Experience(samples, columns, columns, columns)
    ranks.logprobs(samples)
    reference.logprobs(samples)
    assert ranks.update(experience, step=1) == {"policy/loss": 2.0}
    # A call per rank for the policy's pass and for the reference's, and one per rank in the update.
    assert ranks.take_pass_metrics()["vision/tower_calls"] == 2 + 2 + 2
    ranks.update(experience, step=2)
    assert ranks.take_pass_metrics()["vision/tower_calls"] == 2
    assert metrics.take() == {}


def test_a_group_is_never_split() -> None:
    samples = [sample(group) for group in (0, 0, 1, 1, 2, 2, 3, 3)]
    batches = minibatches(samples, 4, np.random.default_rng(0))
    assert [len(batch) for batch in batches] == [4, 4]
    for batch in batches:
        groups = [samples[row].group for row in batch]
        assert all(groups.count(group) == 2 for group in groups)
    assert sorted(row for batch in batches for row in batch) == list(range(8))


def test_the_order_of_groups_follows_from_the_seed() -> None:
    samples = [sample(group) for group in range(32)]
    first, again, other = (minibatches(samples, 8, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_group_larger_than_a_batch_is_a_separate_step() -> None:
    samples = [sample(0), sample(0), sample(0), sample(1)]
    assert sorted(map(len, minibatches(samples, 2, np.random.default_rng(0)))) == [1, 3]


def test_the_loss_is_divided_by_the_sampled_tokens() -> None:
    totals = loss_totals([sample(0, length=5, sampled=2), sample(0, length=4, sampled=3)])
    assert (totals.num_tokens, totals.num_responses) == (5, 2)


def test_fillers_get_zeros_and_samples_their_own_columns() -> None:
    samples = [sample(0), sample(1)]
    rows = [np.full(3, value, dtype=np.float32) for value in (1.0, 2.0)]
    experience = Experience(samples=samples, advantages=rows, old_logprobs=rows, rollout_logprobs=rows)
    filler = sample(9, length=2, sampled=0)
    pack = make_pack([samples[1], filler], [1, -1], "packed")
    part = pack_experience(pack, experience)
    assert [list(row) for row in part.advantages] == [[2.0, 2.0, 2.0], [0.0, 0.0]]
    assert part.ref_logprobs is None


def test_columns_of_other_lengths_are_refused() -> None:
    short = [np.zeros(2, dtype=np.float32)]
    with pytest.raises(ValueError, match="the advantages of an experience do not match the lengths"):
        Experience(samples=[sample(0)], advantages=short, old_logprobs=short, rollout_logprobs=short)


def test_the_optimizer_steps_of_an_experience_share_its_span() -> None:
    samples = [sample(group) for group in (0, 0, 1, 1)]
    blank = [np.zeros(3, np.float32) for _ in samples]
    experience = Experience(samples, blank, None, blank, span=(0.2, 0.6))
    steps = StepPlan(batch_size=2, epochs=2, seed=0)
    spans = [part.span for part in steps.split(experience, 1)]
    assert [span[0] for span in spans if span] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert [span[1] for span in spans if span] == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert [part.span for part in steps.split(Experience(samples, blank, None, blank), 1)] == [None] * 4


def test_a_left_out_sample_does_not_count_and_stays_in_its_group() -> None:
    samples = [sample(0), sample(0).left_out(), sample(1).left_out(), sample(1).left_out()]
    assert loss_totals(samples) == Totals(num_tokens=2, num_responses=1)
    assert loss_totals(samples[2:]) == Totals(num_tokens=1, num_responses=1), "a loss is never divided by 0"
    rng = np.random.default_rng(0)
    assert sorted(minibatches(samples, 2, rng)) == [[0, 1], [2, 3]], "the number of optimizer steps does not change"
    responses = [replace(sample(1), tokens=np.array([0, a, a])).left_out() for a in (5, 6)]
    assert make_pack(responses, [0, 1], "shared").rows == ((Branch((0, 1), 1),),), "they share their prompt"


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_the_loss_is_that_of_a_batch_without_the_left_out_samples(aggregation: Any, kind: str) -> None:
    correction = Correction("seq-mask-tis" if kind == "gspo" else "tis", 0.5, 2.0)
    knobs = PolicyLoss(aggregation=aggregation, max_tokens=3, kind=kind, correction=correction, entropy_coef=0.1)
    samples = [sample(0), sample(0, length=4, sampled=3), sample(1, length=4, sampled=2), sample(1, length=4)]

    def gradient(samples: list[Sample]) -> Tensor:
        """[B, T] of the log-probs, rows in the order of the samples."""
        flags = [torch.nn.functional.pad(torch.tensor(s.sampled), (0, 4 - len(s.tokens))) for s in samples]
        sampled = torch.stack(flags)
        size = sampled.shape
        logprobs = torch.full(size, -1.0, requires_grad=True)
        owner = torch.arange(len(samples))[:, None].expand(size)
        lengths = sampled.sum(dim=1, keepdim=True).expand(size)
        terms = policy_loss(
            knobs,
            logprobs=logprobs,
            old=torch.full(size, -1.0001),
            rollout=torch.full(size, -1.2),
            advantages=torch.full(size, 0.7),
            sampled=sampled,
            owner=owner,
            entropy=-logprobs,
        )
        totals = loss_totals(samples)
        reduce(terms.losses, sampled, aggregation=aggregation, lengths=lengths, totals=totals, max_tokens=3).backward()
        assert logprobs.grad is not None
        return logprobs.grad

    whole = gradient([samples[0], samples[1].left_out(), samples[2], samples[3].left_out()])
    torch.testing.assert_close(whole[[0, 2]], gradient([samples[0], samples[2]]))
    assert whole[[1, 3]].abs().max() == 0


# ---------------------------------------------------------------- responses of several segments


SEGMENTS = [
    (0, [[0, 1], [7, 7], [8], [9]]),
    (0, [[0, 5, 5], [4, 4]]),
    (1, [[0, 1], [6]]),
    (2, [[0, 1, 2], [3, 3, 3]]),
    (2, [[0, 1], [3], [8], [2]]),
    (3, [[0, 1, 2], [5, 5]]),
]
"""Response and spans of each segment; the first two responses are to one prompt, the others to another."""


def of_segments(*, joined: bool) -> list[Sample]:
    """Samples of `SEGMENTS`, or one sample per response with the same tokens end to end."""
    spans: dict[int, list[list[list[int]]]] = {}
    for i, (number, tokens) in enumerate(SEGMENTS):
        spans.setdefault(number if joined else i, []).append(tokens)
    totals = [sum(len(s) for number, tokens in SEGMENTS if number == k for s in tokens[1::2]) for k in range(4)]
    samples = []
    for i, parts in spans.items():
        number = i if joined else SEGMENTS[i][0]
        segments = [make_segment(part) for part in parts]
        samples.append(
            Sample(
                np.concatenate([s.tokens for s in segments]),
                np.concatenate([s.sampled for s in segments]),
                group=number // 2,
                response=None if joined else number,
                response_tokens=None if joined else totals[number],
                shares_prompt=joined or i == 0 or SEGMENTS[i - 1][0] != number,
            )
        )
    return samples


def loss_and_gradients(
    knobs: PolicyLoss, samples: list[Sample], packs: list[Pack], totals: Totals
) -> tuple[float, list[float]]:
    """The loss of an optimizer step over these packs, and the gradients of all sampled tokens in order.

    Log-probs, advantages and engine log-probs of a sampled token depend on its number.
    """
    first = np.cumsum([0, *(int(sample.sampled.sum()) for sample in samples)])
    total, gradients = 0.0, np.zeros(first[-1])
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.4, (4, first[-1])).astype(np.float32)
    for pack in packs:
        numbers = [np.full(len(s.tokens), -1) for s in pack.samples]
        for row, i, sample in zip(numbers, pack.ids, pack.samples, strict=True):
            if i >= 0:
                row[sample.sampled] = np.arange(first[i], first[i + 1])
        number = place(pack, numbers, -1)
        sampled = place(pack, [s.sampled for s in pack.samples], False)
        column = [torch.from_numpy(row)[number] for row in noise]
        logprobs = (column[0] - 1).requires_grad_()
        lengths = [np.full(len(s.tokens), s.length_of_response) for s in pack.samples]
        owners = [np.full(len(s.tokens), o) for s, o in zip(pack.samples, pack.owners, strict=True)]
        terms = policy_loss(
            knobs,
            logprobs=logprobs,
            old=column[0].detach() - 1 + column[1] * 0.1,
            rollout=column[0].detach() - 1 + column[2],
            advantages=column[3] + 0.7,
            sampled=sampled,
            owner=place(pack, owners, 0),
        )
        loss = reduce(
            terms.losses,
            sampled,
            aggregation=knobs.aggregation,
            lengths=place(pack, lengths, 0),
            totals=totals,
            max_tokens=9,
        )
        loss.backward()
        total += loss.item()
        assert logprobs.grad is not None
        gradients[number[sampled].numpy()] += logprobs.grad[sampled].numpy()
    return total, gradients.tolist()


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "aggregation", "correction", "whole"),
    [
        ("ppo", "token", None, False),
        ("ppo", "sequence", Correction("tis", 0.0, 1.2), False),
        ("cispo", "constant", Correction("icepop", 0.7, 1.5), False),
        ("gspo", "sequence", None, True),
        ("gspo", "sequence", Correction("seq-mask-tis", 0.85, 1.2), True),
        ("ppo", "sequence", Correction("seq-mask-tis", 0.85, 1.2), True),
        ("gspo", "token", None, True),
    ],
)
def test_a_response_in_segments_has_the_loss_and_gradients_of_one_row(
    kind: str, aggregation: Any, correction: Correction | None, whole: bool, num_ranks: int, layout: Layout
) -> None:
    knobs = PolicyLoss(
        aggregation=aggregation, max_tokens=9, kind=kind, correction=correction, clip_low=0.03, clip_high=0.03
    )
    one_row, segments = of_segments(joined=True), of_segments(joined=False)
    totals = loss_totals(one_row)
    assert totals == loss_totals(segments) == Totals(num_tokens=13, num_responses=4)
    expected = loss_and_gradients(knobs, one_row, [make_pack(one_row, range(4), "padded")], totals)
    # Packs of 9 tokens: unless responses stay whole, their segments lie in different packs.
    plan = packing(layout, max_tokens=9)
    packs = [pack for rank in plan.spread(segments, num_ranks, whole_responses=whole) for pack in rank]
    numbers = [{s.response for s in pack.samples if s.sampled.any()} for pack in packs]
    is_split = sum(map(len, numbers)) > 4
    assert is_split == (not whole)
    loss, gradients = loss_and_gradients(knobs, segments, packs, totals)
    assert loss == pytest.approx(expected[0], abs=1e-6)
    assert gradients == pytest.approx(expected[1], abs=1e-6)
    assert any(gradients)


def test_the_ratio_of_gspo_needs_whole_responses() -> None:
    """The test above would fail if the packs of `whole_responses` did not matter."""
    knobs = PolicyLoss(aggregation="sequence", max_tokens=9, kind="gspo", clip_low=0.03, clip_high=0.03)
    segments = of_segments(joined=False)
    totals = loss_totals(segments)
    apart = [make_pack([sample], [i], "padded") for i, sample in enumerate(segments)]
    whole = [make_pack(segments, range(6), "padded")]
    first, second = (loss_and_gradients(knobs, segments, packs, totals)[1] for packs in (apart, whole))
    assert first != pytest.approx(second, abs=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_the_policy_keeps_responses_whole_where_its_loss_reads_them(whole: bool) -> None:
    packs_of: list[Pack] = []

    class Recorder(FakeRanks):
        def _call(self, rank: int, function: Any, item: Any) -> Any:
            (work, _) = record_call(function, item)[1]
            packs_of.extend(pack for step in work for pack, _ in step)
            return super()._call(rank, function, item)

    samples = of_segments(joined=False)
    columns = [np.zeros(len(s.tokens), np.float32) for s in samples]
    ranks = Ranks(Recorder(2), packing(max_tokens=9), 100, PassMetrics())  # type: ignore[arg-type]
    remote_policy = RemotePolicy(ranks, StepPlan(batch_size=4, epochs=1, seed=0), whole_responses=whole)
    remote_policy.update(Experience(samples, columns, columns, columns), step=1)
    owners = [{s.response for s in pack.samples if s.sampled.any()} for pack in packs_of]
    assert (sum(map(len, owners)) == 4) == whole


def test_ranks_that_share_tokens_get_the_same_packs_and_count_once() -> None:
    samples = [sample(number, 4) for number in range(8)]
    columns = [np.zeros(4, np.float32)] * 8
    metrics, group = PassMetrics(), FakeRanks(4)
    # A budget of 8 tokens per rank is one of 16 for two ranks: both groups put their four samples into one pack.
    ranks = Ranks(group, packing(max_tokens=16), 8, metrics, sequence_size=2)  # type: ignore[arg-type]
    pairs = RemotePolicy(ranks, StepPlan(batch_size=8, epochs=1, seed=0))
    assert [row.tolist() for row in pairs.logprobs(samples)] == [s.tokens.tolist() for s in samples]
    packs = [packs for _, packs, _ in group.calls]
    assert [len(of_rank) for of_rank in packs] == [1] * 4
    assert packs[0] == packs[1]
    assert packs[2] == packs[3]
    assert set(packs[0][0].ids) | set(packs[2][0].ids) == set(range(8))
    assert pairs.update(Experience(samples, columns, columns, columns), step=1) == {"policy/loss": 2.0}
    # Two groups, a pack each, in log-probs and update.
    assert metrics.take() == {"vision/tower_calls": Sum(4)}
    assert pairs.ranks.over(group).num_groups == 4, "frozen models divide samples, not tokens"  # type: ignore[arg-type]


def test_minibatches_count_responses_not_segments() -> None:
    samples = of_segments(joined=False)
    batches = minibatches(samples, 2, np.random.default_rng(0))
    assert sorted(batches) == [[0, 1, 2], [3, 4, 5]], "three segments each, of two responses"
    assert sorted(map(len, minibatches(samples, 4, np.random.default_rng(0)))) == [6]
    order = [samples[i] for i in (4, 0, 2, 5, 3, 1)]
    assert sorted(minibatches(order, 2, np.random.default_rng(0))) == [[0, 3, 4], [1, 2, 5]]


def test_totals_do_not_count_responses_of_which_all_segments_are_left_out() -> None:
    samples = of_segments(joined=False)
    assert loss_totals([samples[0].left_out(), *samples[1:]]).num_responses == 4
    assert loss_totals([s.left_out() for s in samples[:2]] + samples[2:]) == Totals(num_tokens=8, num_responses=3)
