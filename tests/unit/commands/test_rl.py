"""The source of a run's responses follows from the settings."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from scripted_loop import config

from vlmrl.commands.rl import make_rollouts
from vlmrl.trainer.ahead import Ahead
from vlmrl.trainer.rollouts import InTurn


@pytest.mark.parametrize(
    ("train", "kind"),
    [
        ({}, InTurn),
        ({"async_enable": True, "async_queue_size": 0}, InTurn),
        ({"async_enable": True}, Ahead),
        ({"async_enable": True, "async_queue_size": 2, "partial_rollout_enable": True}, Ahead),
    ],
)
def test_a_queue_of_0_is_the_synchronous_run_itself(train: dict[str, Any], kind: type[Any]) -> None:
    settings = config(train={"batch_size": 4} | train, algo={"advantage": {"is_correction_enable": True}})
    assert type(make_rollouts(settings, MagicMock(), MagicMock(), MagicMock())) is kind
