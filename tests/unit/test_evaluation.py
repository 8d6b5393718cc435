import numpy as np
import pytest

from vlmrl.evaluation import is_right, pass_at_k, summarise
from vlmrl.types import Group, Prompt, Rollout, Score


def answer(finish: str = "stop") -> Rollout:
    tokens = np.array([1, 2])
    return Rollout(tokens, np.array([False, True]), np.zeros(2, np.float32), "a", finish, 0)  # type: ignore[arg-type]


def group(size: int) -> Group:
    prompt = Prompt(index=0, source="toy:0", text="?", tokens=np.array([1]), request=np.array([1]), label=None)
    return Group(prompt, tuple(answer() for _ in range(size)))


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    # 4 answers, 1 right. Two drawn: C(3,2)/C(4,2) = 3/6 miss it.
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 4, 3) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


def test_pass_at_more_than_was_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@8 cannot be told from 4"):
        pass_at_k(4, 1, 8)


def test_a_checking_reward_decides_before_the_total_does() -> None:
    assert is_right(Score(0.2, {"exact": 1.0, "format": 0.0}))
    assert not is_right(Score(0.9, {"math": 0.0, "format": 1.0}))
    assert is_right(Score(0.9, {"mine": 0.9}))


def test_a_set_is_summarised_for_every_power_of_two() -> None:
    scores = [[Score(1.0, {"exact": 1.0}), Score(0.0, {"exact": 0.0})], [Score(0.0, {"exact": 0.0})] * 2]
    metrics = summarise("toy", [group(2), group(2)], scores)
    assert metrics["eval/toy/pass@1"] == 0.25
    assert metrics["eval/toy/pass@2"] == 0.5
    assert metrics["eval/toy/reward"] == 0.25
    assert metrics["eval/toy/tokens_mean"] == 1.0
    assert "eval/toy/pass@4" not in metrics
