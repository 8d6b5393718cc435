"""Attention that keeps samples apart and shares prompts, against a dense mask: values and gradients of every path."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vlmrl.errors import ConfigError
from vlmrl.models.attention import (
    PACKED,
    PACKED_VISION,
    implementation,
    keeps_samples_apart,
    packed_attention,
)
from vlmrl.models.attention_kernels import How, attend, by_mask, by_varlen
from vlmrl.models.attention_plan import Plan, Rows, Span, key_rows, plan, spans_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
D = 8
Groups = Sequence[tuple[int, Sequence[int]]]
"""(tokens of a prompt, tokens of each answer); 0: the answers share no prompt."""

GROUPS: dict[str, Groups] = {
    "one sample": [(0, [5])],
    "equal samples": [(0, [4, 4, 4])],
    "ragged samples": [(0, [5, 1, 9, 4, 3, 16, 2])],
    "one group": [(6, [3, 5, 1])],
    "equal groups": [(4, [4, 4]), (4, [4, 4])],
    "groups of the same prompt length": [(6, [3, 5, 1, 5]), (6, [2, 9]), (6, [7, 8])],
    "groups and samples alone": [(6, [3, 5, 1, 5]), (0, [7]), (3, [1, 1]), (0, [4]), (1, [17, 16, 2])],
    "a prompt whose answers have no tokens": [(5, []), (2, [3]), (5, [4])],
}


def spans(groups: Groups) -> tuple[Span, ...]:
    found: list[Span] = []

    def add(length: int, parent: int | None) -> int:
        start = found[-1].start + found[-1].length if found else 0
        found.append(Span(start, length, parent))
        return len(found) - 1

    for prompt, answers in groups:
        parent = add(prompt, None) if prompt else None
        for length in answers:
            add(length, parent)
    return tuple(found)


def states(length: int, *, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Flat query [T, H, d], key and value [T, Hkv, d]."""
    torch.manual_seed(0)
    return [torch.randn(length, h, D).to(dtype).requires_grad_() for h in (heads, key_heads, key_heads)]


def allowed(over: Sequence[Span], *, causal: bool, window: int | None = None) -> Tensor:
    """[T, T] True where a token may look: what the plan means, token by token."""
    places = []
    for number, span in enumerate(over):
        before = 0 if span.parent is None else over[span.parent].length
        places += [(number, span.parent, before + offset) for offset in range(span.length)]
    mask = torch.zeros(len(places), len(places), dtype=torch.bool)
    for i, (own, parent, position) in enumerate(places):
        for j, (other, _, distance) in enumerate(places):
            is_near = not causal or 0 <= position - distance < (window or len(places))
            mask[i, j] = other in (own, parent) and is_near
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    q, k, v = (flat.transpose(0, 1) for flat in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(
        0, 1
    )


def gradients(out: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad((out * torch.randn(out.shape).to(out.dtype)).sum(), of))


def assert_equals_dense(
    kernel: Callable[[Tensor, Tensor, Tensor, Plan, How], Tensor],
    over: tuple[Span, ...],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = 0.3,
    close: dict[str, float] | None = None,
    **how: Any,
) -> None:
    close = close or {"atol": 1e-6, "rtol": 1e-5}
    leaves = states(over[-1].start + over[-1].length, **how)
    found = kernel(*leaves, plan(over, causal=causal), How(scale, 0.0, window))
    exact = [leaf.detach().to(torch.promote_types(leaf.dtype, torch.float32)).requires_grad_() for leaf in leaves]
    expected = dense(*exact, allowed(over, causal=causal, window=window), scale)
    torch.testing.assert_close(found, expected.to(found.dtype), **close)
    for mine, other in zip(gradients(found, leaves), gradients(expected, exact), strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), atol=10 * close["atol"], rtol=close["rtol"])


@pytest.mark.parametrize("kernel", [attend, by_mask])
@pytest.mark.parametrize("groups", GROUPS)
def test_causal_attention_is_that_of_a_dense_mask(kernel: Callable[..., Tensor], groups: str) -> None:
    assert_equals_dense(kernel, spans(GROUPS[groups]))


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 1), (1, 1)])
def test_any_number_of_key_heads_will_do(heads: int, key_heads: int) -> None:
    assert_equals_dense(attend, spans(GROUPS["groups and samples alone"]), heads=heads, key_heads=key_heads, scale=None)


@pytest.mark.parametrize("kernel", [attend, by_mask])
@pytest.mark.parametrize(
    ("dtype", "close"),
    [
        (torch.float64, {"atol": 1e-12, "rtol": 1e-10}),
        # bf16 keeps 8 bits of a number's mantissa; what lies before and what is one's own is rounded once more.
        (torch.bfloat16, {"atol": 2e-2, "rtol": 2e-2}),
    ],
)
def test_types_keep_their_precision(kernel: Callable[..., Tensor], dtype: torch.dtype, close: dict[str, float]) -> None:
    assert_equals_dense(kernel, spans(GROUPS["groups and samples alone"]), dtype=dtype, close=close)


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("groups", ["ragged samples", "groups and samples alone"])
def test_a_window_reaches_from_an_answer_into_its_prompt(groups: str, window: int) -> None:
    assert_equals_dense(attend, spans(GROUPS[groups]), window=window)


@pytest.mark.parametrize("kernel", [attend, by_mask])
@pytest.mark.parametrize("groups", ["one sample", "equal samples", "ragged samples"])
def test_images_look_both_ways(kernel: Callable[..., Tensor], groups: str) -> None:
    assert_equals_dense(kernel, spans(GROUPS[groups]), causal=False)


# ---------------------------------------------------------------- nothing leaks


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["a prompt", "an answer", "a sample alone"])
def test_nothing_reaches_a_span_that_may_not_see_it(where: str, poison: float) -> None:
    # Every pair of lengths below shares a batch with another one: 5 with 6 and 7, 3 with 4.
    over = spans([(6, [3, 5, 4]), (6, [4, 3, 7]), (0, [5]), (0, [7])])
    number = {"a prompt": 0, "an answer": 2, "a sample alone": 8}[where]
    assert over[number].length == {"a prompt": 6, "an answer": 5, "a sample alone": 5}[where]
    bad = torch.arange(over[number].start, over[number].start + over[number].length)
    is_blind = ~allowed(over, causal=True)[:, bad].any(1)
    # What receives a gradient from a poisoned token is poisoned by right: its prompt.
    family = {number, over[number].parent} | {i for i, span in enumerate(over) if span.parent == number}
    is_stranger = torch.tensor([i not in family for i, span in enumerate(over) for _ in range(span.length)])

    leaves = states(len(is_blind))
    clean = attend(*leaves, plan(over, causal=True), How(0.3))
    poisoned = [leaf.detach().clone() for leaf in leaves]
    for leaf in poisoned:
        leaf[bad] = poison
        leaf.requires_grad_()
    found = attend(*poisoned, plan(over, causal=True), How(0.3))
    assert not found[bad].isfinite().all()
    assert torch.equal(found[is_blind], clean[is_blind])

    weight = torch.where(is_blind[:, None, None], torch.randn(found.shape), 0.0)
    ours = torch.autograd.grad(torch.where(weight != 0, found * weight, 0.0).sum(), poisoned)
    theirs = torch.autograd.grad((clean * weight).sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine[is_stranger], other[is_stranger])


def test_the_gradient_of_padding_reaches_nothing() -> None:
    over = spans([(6, [3, 5]), (0, [7])])
    leaves = states(21)
    out = attend(*leaves, plan(over, causal=True), How(0.3))
    # The last span is the padding behind a row; whatever comes back to it stays there.
    weight = torch.zeros(out.shape)
    weight[14:] = float("inf")
    for gradient in torch.autograd.grad(out, leaves, weight):
        assert not gradient[:14].any()


# ---------------------------------------------------------------- the plan


def test_a_group_is_a_call_for_the_prompt_one_for_the_answers_and_one_for_what_they_see_of_it() -> None:
    found = plan(spans([(768, [128] * 8), (768, [128] * 8)]), causal=True)
    assert [look.queries.shape for look in found.own] == [(2, 768), (16, 128)]
    assert [(look.queries.shape, look.keys.shape) for look in found.before] == [((2, 1024), (2, 768))]
    assert all(look.is_own is None for look in (*found.own, *found.before))
    assert found.length == 2 * (768 + 1024)


def test_short_spans_wait_behind_their_last_token() -> None:
    (look,) = plan(spans([(0, [3, 4])]), causal=True).own
    values = torch.arange(7)
    assert look.queries.take(values).tolist() == [[0, 1, 2, 2], [3, 4, 5, 6]]
    assert look.is_own is not None
    assert look.is_own.tolist() == [True, True, True, False, True, True, True, True]
    assert look.without_stand_ins(look.queries.take(values)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    # Twice the length is too much standing around; and where tokens look ahead nobody may stand in.
    assert len(plan(spans([(0, [3, 5])]), causal=True).own) == 2
    assert len(plan(spans([(0, [3, 4])]), causal=False).own) == 2


def test_an_answer_has_its_prompts_keys_before_its_own() -> None:
    rows, lengths = key_rows(spans([(2, [1, 3]), (0, [2])]))
    assert lengths == [2, 3, 5, 2]
    assert rows.tolist() == [0, 1, *(0, 1, 2), *(0, 1, 3, 4, 5), 6, 7]


def test_equal_packs_are_planned_once() -> None:
    assert plan(spans([(2, [1, 3])]), causal=True) is plan(spans([(2, [1, 3])]), causal=True)


@pytest.mark.parametrize("rows", [[[2, 3], [4, 5]], [[5, 0], [2, 2]]])
def test_rows_are_read_added_to_and_written(rows: list[list[int]]) -> None:
    flat, index = torch.arange(12.0).reshape(6, 2), np.array(rows)
    chosen = Rows(index)
    assert torch.equal(chosen.take(flat), flat[torch.from_numpy(index)])
    sums = flat.clone()
    chosen.add(sums, torch.ones(2, 2, 2))
    counts = np.bincount(index.ravel(), minlength=6)
    assert (sums - flat)[:, 0].tolist() == counts.tolist()
    if counts.max() == 1:
        chosen.put(sums, torch.full((2, 2, 2), -1.0))
        assert sums[index.ravel()].unique().tolist() == [-1]


# ---------------------------------------------------------------- as Transformers calls it


def rows_of(leaves: Sequence[Tensor], batch: int) -> list[Tensor]:
    """[B * T, H, d] -> [B, H, T, d]"""
    return [leaf.reshape(batch, -1, *leaf.shape[1:]).transpose(1, 2) for leaf in leaves]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "batch"), [((5,), 1), ((5, 1, 9, 4, 3, 16, 2), 1), ((3, 4, 6, 1), 2)])
def test_lengths_of_images_are_spans_without_parents(lengths: tuple[int, ...], batch: int, causal: bool) -> None:
    over = spans_of(lengths)
    leaves = states(sum(lengths))
    found, _ = packed_attention(
        nn.Module(),
        *rows_of(leaves, batch),
        None,
        scaling=0.3,
        is_causal=causal,
        cu_seq_lens_q=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        max_length_q=max(lengths),
    )
    expected = dense(*leaves, allowed(over, causal=causal), 0.3)
    torch.testing.assert_close(found.flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


def test_a_plan_covers_several_rows() -> None:
    over = spans([(3, [2, 1]), (0, [4]), (0, [2])])
    leaves = states(12)
    found, _ = packed_attention(
        nn.Module(), *rows_of(leaves, 2), None, scaling=0.3, attention_plan=plan(over, causal=True)
    )
    assert found.shape == (2, 6, 4, D)
    expected = dense(*leaves, allowed(over, causal=True), 0.3)
    torch.testing.assert_close(found.flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_without_lengths_each_row_is_one_causal_sample(window: int | None) -> None:
    leaves = states(12)
    found, _ = packed_attention(nn.Module(), *rows_of(leaves, 2), None, scaling=0.3, sliding_window=window)
    expected = dense(*leaves, allowed(spans_of([6, 6]), causal=True, window=window), 0.3)
    torch.testing.assert_close(found.flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "extra",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(1)},
        {"position_bias": torch.zeros(1)},
        {"attention_mask": torch.ones(5, 5)},
    ],
)
def test_what_packed_attention_cannot_do_is_refused(extra: dict[str, Any]) -> None:
    query, key, value = rows_of(states(5), 1)
    extra = {"attention_mask": None, "attention_plan": plan(spans_of([3, 2]), causal=True)} | extra
    with pytest.raises(ConfigError, match=r"set ds\.attn_implementation to sdpa"):
        packed_attention(nn.Module(), query, key, value, **extra)


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
def test_the_cuda_kernel_agrees_with_masks(causal: bool) -> None:
    torch.manual_seed(0)
    over = spans([(7, [33, 20])]) if causal else spans_of([7, 33, 20])
    q = torch.randn(60, 4, 32, dtype=torch.bfloat16, device=CUDA)
    k, v = (torch.randn(60, 2, 32, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    chosen, how = plan(over, causal=causal), How()
    torch.testing.assert_close(by_varlen(q, k, v, chosen, how), by_mask(q, k, v, chosen, how), atol=2e-2, rtol=2e-2)
