"""Packed attention, isolated samples and shared prompts, against a dense mask: values and gradients of each path."""

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
    isolates_samples,
    packed_attention,
)
from vlmrl.models.attention_kernels import AttentionOptions, attend, by_mask, by_varlen, visible
from vlmrl.models.attention_plan import AttentionPlan, Rows, Span, key_rows, plan_attention, spans_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
D = 8
Groups = Sequence[tuple[int, Sequence[int]]]
"""(tokens of a prompt, tokens of each response); 0: the responses share no prompt."""

GROUPS: dict[str, Groups] = {
    "one sample": [(0, [5])],
    "equal samples": [(0, [4, 4, 4])],
    "ragged samples": [(0, [5, 1, 9, 4, 3, 16, 2])],
    "one group": [(6, [3, 5, 1])],
    "equal groups": [(4, [4, 4]), (4, [4, 4])],
    "groups of the same prompt length": [(6, [3, 5, 1, 5]), (6, [2, 9]), (6, [7, 8])],
    "groups and samples alone": [(6, [3, 5, 1, 5]), (0, [7]), (3, [1, 1]), (0, [4]), (1, [17, 16, 2])],
    "a prompt whose responses have no tokens": [(5, []), (2, [3]), (5, [4])],
}


def spans(groups: Groups) -> tuple[Span, ...]:
    made: list[Span] = []

    def add(length: int, parent: int | None) -> int:
        start = made[-1].start + made[-1].length if made else 0
        made.append(Span(start, length, parent))
        return len(made) - 1

    for prompt, responses in groups:
        parent = add(prompt, None) if prompt else None
        for length in responses:
            add(length, parent)
    return tuple(made)


def states(length: int, *, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random query [T, H, d], key and value [T, Hkv, d]."""
    torch.manual_seed(0)
    return [torch.randn(length, h, D).to(dtype).requires_grad_() for h in (heads, key_heads, key_heads)]


def allowed(over: Sequence[Span], *, causal: bool, window: int | None = None) -> Tensor:
    """[T, T] mask, True where a token attends, token by token."""
    positions = []
    for number, span in enumerate(over):
        before = 0 if span.parent is None else over[span.parent].length
        positions += [(number, span.parent, before + offset) for offset in range(span.length)]
    mask = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    for i, (owner, parent, position) in enumerate(positions):
        for j, (other, _, distance) in enumerate(positions):
            is_near = not causal or 0 <= position - distance < (window or len(positions))
            mask[i, j] = other in (owner, parent) and is_near
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
    kernel: Callable[[Tensor, Tensor, Tensor, AttentionPlan, AttentionOptions], Tensor],
    over: tuple[Span, ...],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = 0.3,
    close: dict[str, float] | None = None,
    **options: Any,
) -> None:
    close = close or {"atol": 1e-6, "rtol": 1e-5}
    leaves = states(over[-1].start + over[-1].length, **options)
    output = kernel(*leaves, plan_attention(over, causal=causal), AttentionOptions(scale, 0.0, window))
    exact = [leaf.detach().to(torch.promote_types(leaf.dtype, torch.float32)).requires_grad_() for leaf in leaves]
    expected = dense(*exact, allowed(over, causal=causal, window=window), scale)
    torch.testing.assert_close(output, expected.to(output.dtype), **close)
    for mine, other in zip(gradients(output, leaves), gradients(expected, exact), strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), atol=10 * close["atol"], rtol=close["rtol"])


@pytest.mark.parametrize("kernel", [attend, by_mask])
@pytest.mark.parametrize("groups", GROUPS)
def test_causal_attention_equals_that_with_a_dense_mask(kernel: Callable[..., Tensor], groups: str) -> None:
    assert_equals_dense(kernel, spans(GROUPS[groups]))


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 1), (1, 1)])
def test_any_number_of_key_heads_works(heads: int, key_heads: int) -> None:
    assert_equals_dense(attend, spans(GROUPS["groups and samples alone"]), heads=heads, key_heads=key_heads, scale=None)


@pytest.mark.parametrize("kernel", [attend, by_mask])
@pytest.mark.parametrize(
    ("dtype", "close"),
    [
        (torch.float64, {"atol": 1e-12, "rtol": 1e-10}),
        # bf16 has 8 bits of mantissa; merging the parts of parent and span rounds once more.
        (torch.bfloat16, {"atol": 2e-2, "rtol": 2e-2}),
    ],
)
def test_dtypes_keep_their_precision(
    kernel: Callable[..., Tensor], dtype: torch.dtype, close: dict[str, float]
) -> None:
    assert_equals_dense(kernel, spans(GROUPS["groups and samples alone"]), dtype=dtype, close=close)


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("groups", ["ragged samples", "groups and samples alone"])
def test_a_window_reaches_from_a_response_into_its_prompt(groups: str, window: int) -> None:
    assert_equals_dense(attend, spans(GROUPS[groups]), window=window)


def test_tokens_of_a_block_see_each_other_and_no_later_token() -> None:
    # x a a x, whose response is b: only the first a sees a later token, the second.
    mask = visible(4, 4, causal=True, window=None, device=CPU, blocks=((1, 2),))
    assert mask is not None
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    # A window of two tokens.
    mask = visible(3, 4, causal=True, window=2, device=CPU, blocks=((0, 2),))
    assert mask is not None
    assert mask.int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


BLOCKS = [((0, 3),), ((2, 3),), ((1, 2), (4, 2)), ((0, 2), (2, 4)), ((5, 1),), ((0, 6),)]


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_cuts_at_blocks_equal_masks(blocks: tuple[tuple[int, int], ...]) -> None:
    over = (Span(0, 6, None, blocks), Span(6, 4, 0), Span(10, 6, 0, blocks), Span(16, 3))
    plan = plan_attention(over, causal=True)
    run = states(19)
    output, expected = (kernel(*run, plan, AttentionOptions(0.3)) for kernel in (attend, by_mask))
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    torch.manual_seed(1)
    slope = torch.randn_like(output)
    mine, other = (torch.autograd.grad(result, run, slope) for result in (output, expected))
    for got, wanted in zip(mine, other, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    causal = attend(
        *run, plan_attention(tuple(span._replace(blocks=()) for span in over), causal=True), AttentionOptions(0.3)
    )
    assert torch.allclose(causal, output) == all(length == 1 for _, length in blocks)


@pytest.mark.parametrize("kernel", [attend, by_mask])
@pytest.mark.parametrize("groups", ["one sample", "equal samples", "ragged samples"])
def test_attention_over_images_is_bidirectional(kernel: Callable[..., Tensor], groups: str) -> None:
    assert_equals_dense(kernel, spans(GROUPS[groups]), causal=False)


# ---------------------------------------------------------------- nothing leaks


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["a prompt", "a response", "a sample alone"])
def test_spans_are_isolated(where: str, poison: float) -> None:
    # Similar lengths share a batch: 5 with 6 and 7, 3 with 4.
    over = spans([(6, [3, 5, 4]), (6, [4, 3, 7]), (0, [5]), (0, [7])])
    number = {"a prompt": 0, "a response": 2, "a sample alone": 8}[where]
    assert over[number].length == {"a prompt": 6, "a response": 5, "a sample alone": 5}[where]
    bad = torch.arange(over[number].start, over[number].start + over[number].length)
    is_blind = ~allowed(over, causal=True)[:, bad].any(1)
    # A poisoned token's prompt gets a poisoned gradient, correctly.
    family = {number, over[number].parent} | {i for i, span in enumerate(over) if span.parent == number}
    is_stranger = torch.tensor([i not in family for i, span in enumerate(over) for _ in range(span.length)])

    leaves = states(len(is_blind))
    clean = attend(*leaves, plan_attention(over, causal=True), AttentionOptions(0.3))
    poisoned = [leaf.detach().clone() for leaf in leaves]
    for leaf in poisoned:
        leaf[bad] = poison
        leaf.requires_grad_()
    output = attend(*poisoned, plan_attention(over, causal=True), AttentionOptions(0.3))
    assert not output[bad].isfinite().all()
    assert torch.equal(output[is_blind], clean[is_blind])

    weight = torch.where(is_blind[:, None, None], torch.randn(output.shape), 0.0)
    ours = torch.autograd.grad(torch.where(weight != 0, output * weight, 0.0).sum(), poisoned)
    theirs = torch.autograd.grad((clean * weight).sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine[is_stranger], other[is_stranger])


def test_gradients_of_padding_reach_no_other_token() -> None:
    over = spans([(6, [3, 5]), (0, [7])])
    leaves = states(21)
    out = attend(*leaves, plan_attention(over, causal=True), AttentionOptions(0.3))
    # The last span is the padding behind a row.
    weight = torch.zeros(out.shape)
    weight[14:] = float("inf")
    for gradient in torch.autograd.grad(out, leaves, weight):
        assert not gradient[:14].any()


# ---------------------------------------------------------------- the plan


def test_a_group_is_one_call_for_prompts_one_for_responses_and_one_from_these_to_prompts() -> None:
    plan = plan_attention(spans([(768, [128] * 8), (768, [128] * 8)]), causal=True)
    assert [call.queries.shape for call in plan.within_spans] == [(2, 768), (16, 128)]
    assert [(call.queries.shape, call.keys.shape) for call in plan.to_parents] == [((2, 1024), (2, 768))]
    assert all(call.is_real is None for call in (*plan.within_spans, *plan.to_parents))
    assert plan.length == 2 * (768 + 1024)


def test_short_spans_are_padded_with_their_last_token() -> None:
    (call,) = plan_attention(spans([(0, [3, 4])]), causal=True).within_spans
    values = torch.arange(7)
    assert call.queries.take(values).tolist() == [[0, 1, 2, 2], [3, 4, 5, 6]]
    assert call.is_real is not None
    assert call.is_real.tolist() == [True, True, True, False, True, True, True, True]
    assert call.drop_padding(call.queries.take(values)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    # Lengths that differ by a factor of two are not batched; without a causal mask only equal lengths are.
    assert len(plan_attention(spans([(0, [3, 5])]), causal=True).within_spans) == 2
    assert len(plan_attention(spans([(0, [3, 4])]), causal=False).within_spans) == 2


def test_keys_of_a_response_are_those_of_its_prompt_and_then_its_own() -> None:
    rows, lengths = key_rows(spans([(2, [1, 3]), (0, [2])]))
    assert lengths == [2, 3, 5, 2]
    assert rows.tolist() == [0, 1, *(0, 1, 2), *(0, 1, 3, 4, 5), 6, 7]


def test_equal_packs_are_planned_once() -> None:
    assert plan_attention(spans([(2, [1, 3])]), causal=True) is plan_attention(spans([(2, [1, 3])]), causal=True)


@pytest.mark.parametrize("rows", [[[2, 3], [4, 5]], [[5, 0], [2, 2]]])
def test_rows_are_taken_added_and_put(rows: list[list[int]]) -> None:
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


# ---------------------------------------------------------------- as called by Transformers


def rows_of(leaves: Sequence[Tensor], batch: int) -> list[Tensor]:
    """[B * T, H, d] -> [B, H, T, d]"""
    return [leaf.reshape(batch, -1, *leaf.shape[1:]).transpose(1, 2) for leaf in leaves]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "batch"), [((5,), 1), ((5, 1, 9, 4, 3, 16, 2), 1), ((3, 4, 6, 1), 2)])
def test_lengths_of_images_are_spans_without_parents(lengths: tuple[int, ...], batch: int, causal: bool) -> None:
    over = spans_of(lengths)
    leaves = states(sum(lengths))
    output, _ = packed_attention(
        nn.Module(),
        *rows_of(leaves, batch),
        None,
        scaling=0.3,
        is_causal=causal,
        cu_seq_lens_q=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        max_length_q=max(lengths),
    )
    expected = dense(*leaves, allowed(over, causal=causal), 0.3)
    torch.testing.assert_close(output.flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


def test_a_plan_covers_several_rows() -> None:
    over = spans([(3, [2, 1]), (0, [4]), (0, [2])])
    leaves = states(12)
    output, _ = packed_attention(
        nn.Module(), *rows_of(leaves, 2), None, scaling=0.3, attention_plan=plan_attention(over, causal=True)
    )
    assert output.shape == (2, 6, 4, D)
    expected = dense(*leaves, allowed(over, causal=True), 0.3)
    torch.testing.assert_close(output.flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_without_lengths_each_row_is_one_causal_sample(window: int | None) -> None:
    leaves = states(12)
    output, _ = packed_attention(nn.Module(), *rows_of(leaves, 2), None, scaling=0.3, sliding_window=window)
    expected = dense(*leaves, allowed(spans_of([6, 6]), causal=True, window=window), 0.3)
    torch.testing.assert_close(output.flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "extra",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(1)},
        {"position_bias": torch.zeros(1)},
        {"attention_mask": torch.ones(5, 5)},
    ],
)
def test_unsupported_attention_is_refused(extra: dict[str, Any]) -> None:
    query, key, value = rows_of(states(5), 1)
    extra = {"attention_mask": None, "attention_plan": plan_attention(spans_of([3, 2]), causal=True)} | extra
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


def test_a_model_uses_the_chosen_attention_for_text_and_images(net: Callable[..., Any]) -> None:
    auto = implementation("auto", CPU)
    assert isolates_samples(net("qwen3", attention=auto))
    vision = net("qwen3_vl", attention=auto)
    assert isolates_samples(vision)
    assert vision.model.visual.blocks[0].attn.config._attn_implementation == PACKED_VISION
    plain = net("qwen3_vl", attention="sdpa")
    assert not isolates_samples(plain)
    assert plain.model.visual.blocks[0].attn.config._attn_implementation == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_the_cuda_kernel_agrees_with_masks(causal: bool) -> None:
    torch.manual_seed(0)
    over = spans([(7, [33, 20])]) if causal else spans_of([7, 33, 20])
    q = torch.randn(60, 4, 32, dtype=torch.bfloat16, device=CUDA)
    k, v = (torch.randn(60, 2, 32, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    chosen, options = plan_attention(over, causal=causal), AttentionOptions()
    torch.testing.assert_close(
        by_varlen(q, k, v, chosen, options), by_mask(q, k, v, chosen, options), atol=2e-2, rtol=2e-2
    )
