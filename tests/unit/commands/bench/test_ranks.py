"""Ranks of a benchmark."""

import os

import pytest
import torch

from vlmrl.commands.bench.ranks import other_ranks
from vlmrl.errors import ConfigError


def test_one_rank_is_this_process_as_it_is() -> None:
    before = dict(os.environ)
    with other_ranks(1, print, None):
        assert dict(os.environ) == before


def test_ranks_need_a_gpu_each_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks need 2 GPUs, and this machine has 1"), other_ranks(2, print, None):
        pass
