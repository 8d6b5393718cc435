"""Sliced log-probs against plain ones: values, gradients, bans, temperature, memory."""

import pytest
import torch
from torch import Tensor, nn

from vlmrl.models.logprobs import BAN, ScoringHead, token_logprobs

T, D, V = 13, 8, 29


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, banned: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(hidden, weight, bias)
    ban = torch.zeros(len(weight), dtype=logits.dtype)
    ban[list(banned)] = BAN
    log_p = ((logits + ban) / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def case(*, with_bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    bias = torch.randn(V, dtype=dtype) if with_bias else None
    leaves = [tensor.requires_grad_() if tensor is not None else None for tensor in (hidden, weight, bias)]
    assert leaves[0] is not None
    assert leaves[1] is not None
    return leaves[0], leaves[1], leaves[2], torch.randint(V, (T,))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("temperature", "banned"), [(1.0, ()), (0.7, (3, 28)), (1.6, (0,))])
@pytest.mark.parametrize("slice_size", [1, 2 * V, 5 * T, 10**6])
def test_values_and_gradients_are_those_of_full_logits(
    with_bias: bool, temperature: float, banned: tuple[int, ...], slice_size: int
) -> None:
    hidden, weight, bias, targets = case(with_bias=with_bias)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    of_logprobs, of_entropy = torch.randn(T), torch.randn(T)

    ours = token_logprobs(hidden, weight, bias, targets, temperature=temperature, banned=banned, slice_size=slice_size)
    ours_gradients = torch.autograd.grad((ours.logprobs * of_logprobs + ours.entropy * of_entropy).sum(), leaves)
    logprobs, entropy = plain(hidden, weight, bias, targets, temperature, banned)
    gradients = torch.autograd.grad((logprobs * of_logprobs + entropy * of_entropy).sum(), leaves)

    torch.testing.assert_close(ours.logprobs, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.entropy, entropy, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(ours_gradients, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("output", ["logprobs", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_loss_on_one_of_the_two_alone_has_the_gradients_of_full_logits(output: str, temperature: float) -> None:
    hidden, weight, bias, targets = case(with_bias=True)
    assert bias is not None
    leaves, scale = (hidden, weight, bias), torch.randn(T)
    ours = getattr(token_logprobs(hidden, weight, bias, targets, temperature=temperature, slice_size=5 * T), output)
    theirs = dict(zip(("logprobs", "entropy"), plain(hidden, weight, bias, targets, temperature, ()), strict=True))
    gradients = torch.autograd.grad((ours * scale).sum(), leaves)
    for mine, other in zip(gradients, torch.autograd.grad((theirs[output] * scale).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_gradients_pass_the_numerical_check() -> None:
    hidden, weight, bias, targets = case(with_bias=True, dtype=torch.float64)
    assert bias is not None
    assert torch.autograd.gradcheck(
        lambda h, w, b: tuple(token_logprobs(h, w, b, targets, temperature=0.8, banned=(1,), slice_size=3 * V)),
        (hidden, weight, bias),
    )


def test_two_tokens_by_hand() -> None:
    # Logits 0 and log 3: probabilities 1/4 and 3/4.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0986123]])
    output = token_logprobs(hidden, weight, None, torch.tensor([1]))
    assert output.logprobs.item() == pytest.approx(-0.2876821)
    assert output.entropy.item() == pytest.approx(0.25 * 1.3862944 + 0.75 * 0.2876821)


def test_a_ban_is_added_before_the_temperature() -> None:
    # Token 0 is banned at temperature 2: its logit is -100 / 2, and token 1 has nearly all the probability.
    output = token_logprobs(torch.ones(1, 1), torch.zeros(2, 1), None, torch.tensor([0]), temperature=2.0, banned=(0,))
    assert output.logprobs.item() == pytest.approx(-50.0)


def test_bf16_inputs_are_summed_in_fp32() -> None:
    hidden, weight, _, targets = case(with_bias=False)
    half = [hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()]
    output = token_logprobs(half[0], half[1], None, targets, slice_size=2 * V)
    assert output.logprobs.dtype == torch.float32
    output.logprobs.sum().backward()
    expected, _ = plain(half[0].detach().float(), half[1].detach().float(), None, targets, 1.0, ())
    torch.testing.assert_close(output.logprobs, expected, atol=5e-2, rtol=5e-2)
    assert half[0].grad is not None
    assert half[0].grad.dtype == torch.bfloat16


def test_a_frozen_head_gets_no_gradient_but_passes_it_on() -> None:
    hidden, weight, _, targets = case(with_bias=False)
    token_logprobs(hidden, weight.detach(), None, targets).logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_without_tokens_gradients_are_zero() -> None:
    _, weight, _, _ = case(with_bias=False)
    output = token_logprobs(torch.zeros(0, D), weight, None, torch.zeros(0, dtype=torch.long))
    output.logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


def test_full_logits_are_never_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight = torch.randn(200, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    with Watch():
        output = token_logprobs(hidden, weight, None, torch.zeros(200, dtype=torch.long), slice_size=3000)
        (output.logprobs.sum() + output.entropy.sum()).backward()
    assert 0 < largest <= 3000


def test_an_adopted_head_is_the_same_layer() -> None:
    linear = nn.Linear(D, V, bias=False)
    weight = linear.weight
    head = ScoringHead.adopt(linear)
    assert head is linear
    assert head.weight is weight
    hidden = torch.randn(T, D)
    torch.testing.assert_close(head(hidden), hidden @ weight.T)
