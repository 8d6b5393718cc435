"""User-defined losses. That a policy learns, on ranks with DeepSpeed: end_to_end/test_learning*.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.errors import ConfigError
from vlmrl.learning.policy import _load_user_loss


def loss(kind: str) -> PolicyLoss:
    return PolicyLoss(aggregation="token", max_tokens=8, kind=kind)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def likely(logprobs, advantages):\n    return -advantages * logprobs\n\ndef odd(weather): ...\n")
    return path


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_a_built_in_loss_stays_a_name(kind: str) -> None:
    assert _load_user_loss(loss(kind)) == loss(kind)


def test_a_user_loss_is_imported_in_the_policys_process(file: Path) -> None:
    kind = _load_user_loss(loss(f"{file}:likely")).kind
    assert callable(kind)
    assert kind.__name__ == "likely"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("{file}:unlikely", "has no function unlikely; it has: likely, odd"),
        ("{file}:odd", "odd requires weather"),
        ("nowhere.py:f", "there is no file nowhere.py"),
    ],
)
def test_a_missing_or_unusable_user_loss_is_refused_in_one_line(file: Path, kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        _load_user_loss(loss(kind.format(file=file)))
    assert "actor.policy_loss_type" in str(caught.value)
    assert "\n" not in str(caught.value)
