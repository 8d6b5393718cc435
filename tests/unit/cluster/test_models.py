"""What the driver does beside calling ranks: packs, sums of counts, results in the order of the samples."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
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
    Steps,
    count,
    experience_of,
    minibatches,
)
from vlmrl.cluster.remote_call import recorded
from vlmrl.data.media import Blank
from vlmrl.data.packing import Branch, Pack, make_pack
from vlmrl.observe.metrics import Metric, Sum
from vlmrl.types import Experience, Floats, Layout, Sample, Totals

dot = partial(Blank, size=(28, 28))


def sample(group: int, length: int = 3, sampled: int = 2) -> Sample:
    flags = np.arange(length) >= length - sampled
    return Sample(tokens=np.arange(length), sampled=flags, group=group)


def packing(layout: Layout = "shared", max_tokens: int = 100) -> PackingPlan:
    return PackingPlan(layout, max_tokens, max_samples=None, image_cost=lambda image: 10.0, filler=None)


class Echo:
    """Ranks that answer at once: the log-probs of a sample are its tokens, and each pack one call of the tower."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[tuple[int, list[Pack], dict[str, Any]]] = []

    def __len__(self) -> int:
        return self.number

    def _call(self, rank: int, ask: Any, item: Any) -> Any:
        method, given, how = recorded(ask, item)
        if method == "update":
            work, totals = given
            return [
                {"policy/loss": Sum(1.0), "vision/tower_calls": Sum(len(packs))}
                for packs, _ in zip(work, totals, strict=True)
            ]
        assert method == "logprobs"
        (packs,) = given
        self.asked.append((rank, packs, dict(how)))
        rows: list[tuple[int, Floats]] = []
        for pack in packs:
            rows += [(i, s.tokens.astype(np.float32)) for i, s in zip(pack.ids, pack.samples, strict=True) if i >= 0]
        counts: dict[str, Metric] = {"vision/tower_calls": Sum(len(packs))}
        return rows[::-1], counts

    def each(self, ask: Any, items: list[Any]) -> list[Any]:
        return [self._call(rank, ask, item) for rank, item in enumerate(items)]


class Scoring(Echo):
    """The values of a critic: the tokens of a sample, each plus one."""

    def _call(self, rank: int, ask: Any, item: Any) -> Any:
        method, given, _ = recorded(ask, item)
        assert method in ("values", "update_values")
        if method == "update_values":
            work, totals = given
            return [{"value/loss": Sum(float(total.num_tokens))} for _, total in zip(work, totals, strict=True)]
        rows = [(i, s.tokens + 1.0) for pack in given[0] for i, s in zip(pack.ids, pack.samples, strict=True) if i >= 0]
        return rows, {}


def rows_asked(group: Echo) -> list[tuple[tuple[Branch, ...], ...]]:
    return [pack.rows for _, packs, _ in group.asked for pack in packs]


def remote(group: Any, pass_metrics: PassMetrics, *, max_tokens: int = 100) -> RemoteReference:
    return RemoteReference(Ranks(group, packing(), max_tokens, pass_metrics))


def policy(group: Any, pass_metrics: PassMetrics) -> RemotePolicy:
    return RemotePolicy(Ranks(group, packing(), 100, pass_metrics), Steps(batch_size=4, epochs=1, seed=0))


def test_every_epoch_meets_every_sample_in_another_order() -> None:
    samples = [sample(number, 4) for number in range(16)]
    whole = [np.zeros(4, np.float32)] * 16
    experience = Experience(samples, advantages=whole, old_logprobs=whole, rollout_logprobs=whole)
    steps = Steps(batch_size=4, epochs=2, seed=-1).of(experience, 3)
    met = [[s.group for part in epoch for s in part.samples] for epoch in (steps[:4], steps[4:])]
    assert [len(part.samples) for part in steps] == [4] * 8
    assert sorted(met[0]) == sorted(met[1]) == list(range(16))
    assert met[0] != met[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_answers_come_back_in_the_order_of_the_question(num_ranks: int) -> None:
    samples = [sample(group, length) for group, length in ((0, 5), (1, 3), (0, 4), (2, 6), (1, 7))]
    found = remote(Echo(num_ranks), PassMetrics()).logprobs(samples)
    assert [row.tolist() for row in found] == [s.tokens.tolist() for s in samples]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_samples_that_are_not_dealt_out_share_their_prompts_on_every_rank(num_ranks: int) -> None:
    samples = [sample(group, 5) for group in (0, 0, 1, 1)]
    group = Echo(num_ranks)
    found = policy(group, PassMetrics()).logprobs(samples, undivided=True)
    assert [row.tolist() for row in found] == [s.tokens.tolist() for s in samples]
    assert len({str(packs[0].rows) for _, packs, _ in group.asked}) == 1, "collectives stay in step"
    assert [[branch.members for row in packs[0].rows for branch in row] for _, packs, _ in group.asked] == [
        [(0, 1), (2, 3)]
    ] * num_ranks
    assert [[i >= 0 for pack in packs for i in pack.ids] for _, packs, _ in group.asked] == [
        [rank == 0] * 4 for rank in range(num_ranks)
    ]


def test_another_layout_and_another_way_reach_the_ranks_on_request() -> None:
    group = Echo(1)
    ask = policy(group, PassMetrics())
    samples = [sample(0, 3, 1), sample(0, 4, 2)]
    ask.logprobs(samples)
    ask.logprobs(samples, layout="padded", gradient=True)
    assert rows_asked(group) == [((Branch((0, 1), 2),),), ((Branch((0,), 0),), (Branch((1,), 0),))]
    assert [how["gradient"] for _, _, how in group.asked] == [False, True]


def test_a_reference_on_the_ranks_of_the_policy_is_always_asked_without_the_adapter() -> None:
    group = Echo(1)
    trained = policy(group, PassMetrics())
    PolicyWithoutAdapter(trained).logprobs([sample(0)])
    trained.logprobs([sample(0)])
    assert [how["adapter"] for _, _, how in group.asked] == [False, True]


def test_a_critic_says_values_in_the_order_of_the_samples_and_learns_from_the_same_steps_as_the_policy() -> None:
    critic = RemoteCritic(Ranks(Scoring(2), packing(), 100, PassMetrics()), Steps(4, epochs=1, seed=0))  # type: ignore[arg-type]
    samples = [sample(group, length) for group, length in ((0, 5), (1, 3), (0, 4))]
    assert [row.tolist() for row in critic.values(samples)] == [(s.tokens + 1.0).tolist() for s in samples]
    columns = [np.zeros(len(s.tokens), dtype=np.float32) for s in samples]
    experience = Experience(samples, columns, columns, columns, values=columns, returns=columns)
    # Two sampled tokens of each of three samples, which both ranks are told.
    assert critic.update(experience, step=1) == {"value/loss": 2 * 6.0}


def test_passes_without_gradient_have_a_budget_of_their_own() -> None:
    group = Echo(1)
    # Together 2 + 1 + 2 tokens.
    for max_tokens, number in ((5, 1), (4, 2)):
        group.asked.clear()
        remote(group, PassMetrics(), max_tokens=max_tokens).logprobs([sample(0, 3, 1), sample(0, 4, 2)])
        assert len(rows_asked(group)) == number


def test_an_image_counts_towards_the_budget() -> None:
    shown = [Sample(np.arange(3), np.arange(3) > 1, (dot(str(n)),), n) for n in range(2)]
    for max_tokens, number in ((26, 1), (25, 2)):
        (packs,) = packing(max_tokens=max_tokens).spread(shown, 1)
        assert len(packs) == number


def test_what_all_passes_of_a_step_took_is_told_once_with_the_step() -> None:
    counted, group = PassMetrics(), Echo(2)
    ranks, reference = policy(group, counted), remote(group, counted)
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
    assert counted.take() == {}


def test_a_group_is_never_torn_apart() -> None:
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


def test_a_group_larger_than_a_batch_is_a_step_of_its_own() -> None:
    samples = [sample(0), sample(0), sample(0), sample(1)]
    assert sorted(map(len, minibatches(samples, 2, np.random.default_rng(0)))) == [1, 3]


def test_the_loss_is_divided_by_what_was_sampled() -> None:
    totals = count([sample(0, length=5, sampled=2), sample(0, length=4, sampled=3)])
    assert (totals.num_tokens, totals.num_samples) == (5, 2)


def test_fillers_get_zeros_and_samples_their_own_columns() -> None:
    samples = [sample(0), sample(1)]
    rows = [np.full(3, value, dtype=np.float32) for value in (1.0, 2.0)]
    experience = Experience(samples=samples, advantages=rows, old_logprobs=rows, rollout_logprobs=rows)
    filler = sample(9, length=2, sampled=0)
    pack = make_pack([samples[1], filler], [1, -1], "packed")
    part = experience_of(pack, experience)
    assert [list(row) for row in part.advantages] == [[2.0, 2.0, 2.0], [0.0, 0.0]]
    assert part.ref_logprobs is None


def test_columns_that_do_not_line_up_are_refused() -> None:
    short = [np.zeros(2, dtype=np.float32)]
    with pytest.raises(ValueError, match="the advantages of an experience do not match the lengths"):
        Experience(samples=[sample(0)], advantages=short, old_logprobs=short, rollout_logprobs=short)


def test_the_optimizer_steps_of_an_experience_share_its_span() -> None:
    samples = [sample(group) for group in (0, 0, 1, 1)]
    blank = [np.zeros(3, np.float32) for _ in samples]
    given = Experience(samples, blank, None, blank, span=(0.2, 0.6))
    steps = Steps(batch_size=2, epochs=2, seed=0)
    spans = [part.span for part in steps.of(given, 1)]
    assert [span[0] for span in spans if span] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert [span[1] for span in spans if span] == pytest.approx([0.3, 0.4, 0.5, 0.6])
    assert [part.span for part in steps.of(Experience(samples, blank, None, blank), 1)] == [None] * 4


def test_a_sample_that_is_left_out_counts_for_nothing_and_stays_in_its_group() -> None:
    samples = [sample(0), sample(0).left_out(), sample(1).left_out(), sample(1).left_out()]
    assert count(samples) == Totals(num_tokens=2, num_samples=1)
    assert count(samples[2:]) == Totals(num_tokens=1, num_samples=1), "a loss is never divided by 0"
    rng = np.random.default_rng(0)
    assert sorted(minibatches(samples, 2, rng)) == [[0, 1], [2, 3]], "as many optimizer steps as ever"
    answers = [replace(sample(1), tokens=np.array([0, a, a])).left_out() for a in (5, 6)]
    assert make_pack(answers, [0, 1], "shared").rows == ((Branch((0, 1), 1),),), "they share their prompt"


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_the_loss_is_that_of_a_batch_without_the_samples_that_are_left_out(aggregation: Any, kind: str) -> None:
    correction = Correction("seq-mask-tis" if kind == "gspo" else "tis", 0.5, 2.0)
    knobs = PolicyLoss(aggregation=aggregation, max_new_tokens=3, kind=kind, correction=correction, entropy_coef=0.1)
    answers = [sample(0), sample(0, length=4, sampled=3), sample(1, length=4, sampled=2), sample(1, length=4)]

    def gradient(samples: list[Sample]) -> Tensor:
        """[B, T] of the log-probs, rows in the order of the samples."""
        flags = [torch.nn.functional.pad(torch.tensor(s.sampled), (0, 4 - len(s.tokens))) for s in samples]
        sampled = torch.stack(flags)
        size = sampled.shape
        logprobs = torch.full(size, -1.0, requires_grad=True)
        owner = torch.arange(len(samples))[:, None].expand(size)
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
        totals = count(samples)
        reduce(terms.losses, sampled, aggregation=aggregation, owner=owner, totals=totals, max_new_tokens=3).backward()
        assert logprobs.grad is not None
        return logprobs.grad

    whole = gradient([answers[0], answers[1].left_out(), answers[2], answers[3].left_out()])
    torch.testing.assert_close(whole[[0, 2]], gradient([answers[0], answers[2]]))
    assert whole[[1, 3]].abs().max() == 0
