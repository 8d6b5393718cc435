"""Without Liger's kernels, the setting is refused in one line."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vlmrl.errors import ConfigError
from vlmrl.models.liger import apply_liger


def test_liger_without_cuda_is_refused(net: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"ds\.use_liger_kernel needs CUDA, and this run is on cpu: leave it out"):
        apply_liger(net("qwen3"), torch.device("cpu"))


def test_liger_that_is_not_installed_is_refused(net: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ConfigError, match="the package liger-kernel is not installed: run make setup"):
        apply_liger(net("qwen3"), torch.device("cuda"))
