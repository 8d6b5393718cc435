import numpy as np
import pytest

from vlmrl.cluster.roles import count, experience_of, minibatches
from vlmrl.data.packing import make_pack
from vlmrl.types import Experience, Sample


def sample(group: int, length: int = 3, sampled: int = 2) -> Sample:
    flags = np.arange(length) >= length - sampled
    return Sample(tokens=np.arange(length), sampled=flags, group=group)


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
    with pytest.raises(ValueError, match="do not line up"):
        Experience(samples=[sample(0)], advantages=short, old_logprobs=short, rollout_logprobs=short)
