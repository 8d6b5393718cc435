"""Sliced divergences against those of full logits: values, gradients, output layers of different sizes, memory."""

import pytest
import torch
from torch import Tensor, nn

from vlmrl.models.divergence import Direction, TeacherRows, token_divergence

T, D, V = 13, 8, 29
OTHER_D = 6
DIRECTIONS: tuple[Direction, ...] = ("forward", "reverse")


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: TeacherRows) -> Tensor:
    common = min(len(weight), len(teacher.weight))
    log_p = nn.functional.linear(hidden, weight, bias)[:, :common].log_softmax(-1)
    log_q = nn.functional.linear(teacher.hidden, teacher.weight, teacher.bias)[:, :common].log_softmax(-1)
    left, right = (log_q, log_p) if teacher.direction == "forward" else (log_p, log_q)
    return (left.exp() * (left - right)).sum(-1)


def case(
    direction: Direction, *, rows: int = V, with_bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], TeacherRows]:
    torch.manual_seed(0)
    shapes = ((T, D), (V, D), (V,)) if with_bias else ((T, D), (V, D))
    leaves = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    states, head = torch.randn(T, OTHER_D, dtype=dtype), torch.randn(rows, OTHER_D, dtype=dtype)
    return leaves, TeacherRows(states, head, torch.randn(rows, dtype=dtype) if with_bias else None, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rows", [V, V + 4, V - 4])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("slice_size", [1, 2 * V, 5 * T, 10**6])
def test_values_and_gradients_are_those_of_full_logits(
    direction: Direction, rows: int, with_bias: bool, slice_size: int
) -> None:
    leaves, teacher = case(direction, rows=rows, with_bias=with_bias)
    given = leaves if with_bias else [*leaves, None]
    scale = torch.randn(T)
    ours = token_divergence(*given, teacher, slice_size=slice_size)  # type: ignore[arg-type]
    theirs = plain(*given, teacher)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = zip(*(torch.autograd.grad((x * scale).sum(), leaves) for x in (ours, theirs)), strict=True)
    for mine, other in gradients:
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_pass_the_numerical_check(direction: Direction) -> None:
    leaves, teacher = case(direction, rows=V + 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w, b: token_divergence(h, w, b, teacher, slice_size=3 * V), leaves)


@pytest.mark.parametrize(("direction", "expected"), [("forward", 0.1438410), ("reverse", 0.1308117)])
def test_two_tokens_by_hand(direction: Direction, expected: float) -> None:
    # The student has 1/4 and 3/4, the teacher 1/2 and 1/2. Forward: log 2 / 2 + log (2/3) / 2; reverse: log (1/2) / 4 +
    # 3 log (3/2) / 4.
    student = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0986123]])
    teacher = TeacherRows(torch.tensor([[1.0]]), torch.zeros(2, 1), None, direction)
    assert token_divergence(*student, None, teacher).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_teacher_that_is_the_student_has_no_divergence_and_no_gradient(direction: Direction) -> None:
    (hidden, weight, bias), _ = case(direction)
    teacher = TeacherRows(hidden.detach(), weight.detach(), bias.detach(), direction)
    divergence = token_divergence(hidden, weight, bias, teacher)
    assert divergence.abs().max() < 1e-6
    for gradient in torch.autograd.grad(divergence.sum(), (hidden, weight, bias)):
        assert gradient.abs().max() < 1e-5


def test_frozen_weights_get_no_gradient() -> None:
    (hidden, weight, bias), teacher = case("reverse")
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    token_divergence(hidden, weight, bias, teacher).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
