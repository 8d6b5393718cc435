"""Packed attention against a dense mask, for causal rows, windows, unequal heads, and images that look both ways."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlmrl.errors import ConfigError
from vlmrl.models.attention import (
    PACKED,
    PACKED_VISION,
    _by_length,
    _How,
    _varlen,
    implementation,
    keeps_samples_apart,
    packed_attention,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
H, HKV, D = 4, 2, 8


def states(*lengths: int, batch: int = 1, device: torch.device = CPU) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value of B rows, and where samples start in the rows laid end to end."""
    torch.manual_seed(0)
    total = sum(lengths) // batch
    query = torch.randn(batch, H, total, D, requires_grad=True)
    key, value = (torch.randn(batch, HKV, total, D, requires_grad=True) for _ in range(2))
    return query, key, value, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def dense(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, causal: bool, window: int | None) -> Tensor:
    batch, _, length, _ = query.shape
    position = torch.arange(batch * length).reshape(batch, length)
    sample = torch.bucketize(position, starts[1:], right=True)
    distance = position[:, :, None] - position[:, None, :]
    allowed = sample[:, :, None] == sample[:, None, :]
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance < window
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed[:, None], scale=0.3, enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None)])
@pytest.mark.parametrize(
    ("lengths", "batch"), [((5,), 1), ((4, 4, 4), 1), ((5, 1, 9, 4, 3, 16, 2), 1), ((3, 4, 6, 1), 2)]
)
def test_packed_attention_is_attention_under_a_block_mask(
    lengths: tuple[int, ...], batch: int, causal: bool, window: int | None
) -> None:
    query, key, value, starts = states(*lengths, batch=batch)
    found, _ = packed_attention(
        nn.Module(),
        *(query, key, value, None),
        scaling=0.3,
        is_causal=causal,
        sliding_window=window,
        cu_seq_lens_q=starts,
        max_length_q=max(lengths),
    )
    expected = dense(query, key, value, starts, causal=causal, window=window)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_without_lengths_each_row_is_one_causal_sample() -> None:
    query, key, value, starts = states(6, 6, batch=2)
    found, _ = packed_attention(nn.Module(), query, key, value, None, scaling=0.3)
    torch.testing.assert_close(found, dense(query, key, value, starts, causal=True, window=None), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(1)}, {"position_bias": torch.zeros(1)}])
def test_what_packed_attention_cannot_do_is_refused(extra: dict[str, Any]) -> None:
    query, key, value, starts = states(3, 2)
    with pytest.raises(ConfigError, match=r"set ds\.attn_implementation to sdpa"):
        packed_attention(nn.Module(), query, key, value, None, cu_seq_lens_q=starts, max_length_q=3, **extra)


def test_the_setting_is_translated_for_the_device() -> None:
    assert implementation("sdpa", CPU) == "sdpa"
    assert implementation("eager", CUDA) == "eager"
    for setting, device in (("auto", CPU), ("auto", CUDA), ("varlen", CUDA)):
        chosen = implementation(setting, device)  # type: ignore[arg-type]
        assert isinstance(chosen, dict)
        assert chosen["text_config"] == PACKED


def test_varlen_without_cuda_is_refused() -> None:
    with pytest.raises(ConfigError, match="varlen runs on CUDA only"):
        implementation("varlen", CPU)


def test_a_model_takes_the_chosen_attention_for_text_and_for_images(net: Callable[..., Any]) -> None:
    auto = implementation("auto", CPU)
    assert keeps_samples_apart(net("qwen3", attention=auto))
    vision = net("qwen3_vl", attention=auto)
    assert keeps_samples_apart(vision)
    assert vision.model.visual.blocks[0].attn.config._attn_implementation == PACKED_VISION
    plain = net("qwen3_vl", attention="sdpa")
    assert not keeps_samples_apart(plain)
    assert plain.model.visual.blocks[0].attn.config._attn_implementation == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_the_cuda_kernel_agrees_with_sdpa(causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(60, H, 32, dtype=torch.bfloat16, device=CUDA)
    k, v = (torch.randn(60, HKV, 32, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    starts = torch.tensor([0, 7, 40, 60], dtype=torch.int32, device=CUDA)
    how = _How(None, 0.0, causal, None)
    torch.testing.assert_close(
        _varlen(q, k, v, starts, 33, how), _by_length(q, k, v, [7, 33, 20], how), atol=2e-2, rtol=2e-2
    )
