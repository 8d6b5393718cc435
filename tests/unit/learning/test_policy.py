"""A loss of one's own. That a policy learns, on ranks and with DeepSpeed: test_learning*.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.errors import ConfigError
from vlmrl.learning.policy import _with_own


def loss(kind: str) -> PolicyLoss:
    return PolicyLoss(aggregation="token", max_new_tokens=8, kind=kind)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def likely(logprobs, advantages):\n    return -advantages * logprobs\n\ndef odd(weather): ...\n")
    return path


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_a_loss_of_ours_stays_a_name(kind: str) -> None:
    assert _with_own(loss(kind)) == loss(kind)


def test_a_loss_of_ones_own_is_read_where_the_policy_is(file: Path) -> None:
    found = _with_own(loss(f"{file}:likely")).kind
    assert callable(found)
    assert found.__name__ == "likely"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("{file}:unlikely", "has no function unlikely; it has: likely, odd"),
        ("{file}:odd", "odd requires weather"),
        ("nowhere.py:f", "there is no file nowhere.py"),
    ],
)
def test_a_loss_that_is_not_there_is_refused_in_one_line(file: Path, kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        _with_own(loss(kind.format(file=file)))
    assert "actor.policy_loss_type" in str(caught.value)
    assert "\n" not in str(caught.value)
