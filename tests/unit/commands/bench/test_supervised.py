"""Rows of the benchmark of supervised training."""

import numpy as np
import pytest

from vlmrl.commands.bench.supervised import chat_lengths
from vlmrl.config.bench import ChatRows


@pytest.mark.parametrize("rows", [8, 32, 200])
def test_lengths_have_the_given_mean_and_largest(rows: int) -> None:
    lengths = chat_lengths(ChatRows(rows=rows), seed=1)
    assert len(lengths) == rows
    assert max(lengths) == 2048
    assert np.mean(lengths) == pytest.approx(300, rel=0.02)
    assert np.median(lengths) < 300
    assert lengths != sorted(lengths)
    assert lengths == chat_lengths(ChatRows(rows=rows), seed=1)
