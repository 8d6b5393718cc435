from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.algorithms.user_function import call
from vlmrl.errors import ConfigError
from vlmrl.system.user_function import declared

OFFERED = ("rewards", "sampled", "values")


def test_a_function_receives_the_arguments_that_it_declares() -> None:
    def mine(sampled: Tensor, *, values: Tensor, power: int = 2) -> Tensor:
        return sampled + values**power

    assert declared(mine, OFFERED, flag="a.b") == {"sampled", "values"}
    offered = {"rewards": None, "sampled": torch.ones(2), "values": torch.full((2,), 3.0)}
    assert call(mine, offered, shapes=[(2,)], flag="a.b").tolist() == [10.0, 10.0]


def test_keyword_arguments_receive_everything() -> None:
    def mine(**given: Any) -> Tensor:
        assert set(given) == set(OFFERED)
        return torch.zeros(1)

    assert declared(mine, OFFERED, flag="a.b") == set(OFFERED)
    assert call(mine, dict.fromkeys(OFFERED), shapes=[(1,)], flag="a.b").tolist() == [0.0]


def test_a_callable_object_is_a_function() -> None:
    class Scaled:
        def __call__(self, rewards: Tensor) -> Tensor:
            return 2 * rewards

    assert call(Scaled(), {"rewards": torch.ones(1)}, shapes=[(1,)], flag="a.b").tolist() == [2.0]


def test_a_failing_function_is_reported_with_its_line() -> None:
    def broken() -> Tensor:
        raise KeyError("first\nsecond")

    with pytest.raises(
        ConfigError, match=r"^a\.b: broken failed: KeyError: .*\(.*test_user_function\.py:\d+\)$"
    ) as caught:
        call(broken, {}, shapes=[(1,)], flag="a.b")
    assert "\n" not in str(caught.value)
