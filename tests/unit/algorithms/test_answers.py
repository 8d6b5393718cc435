import torch

from vlmrl.algorithms.answers import answer_mean

F, T = False, True


def test_the_mean_of_an_answer_lies_on_its_tokens_and_nowhere_else() -> None:
    sampled = torch.tensor([[F, T, T, F, T], [T, F, F, T, F]])
    # Answer 7 has a gap; answer 3 is alone in its row; owner numbers need not be dense.
    owner = torch.tensor([[7, 7, 7, 7, 7], [0, 0, 0, 3, 3]])
    values = torch.tensor([[9.0, 1.0, 2.0, float("nan"), 6.0], [5.0, float("inf"), 9.0, 4.0, 9.0]])
    assert answer_mean(values, sampled, owner).tolist() == [[0, 3.0, 3.0, 0, 3.0], [5.0, 0, 0, 4.0, 0]]


def test_nothing_sampled_is_zero() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    found = answer_mean(torch.full((1, 2), float("nan")), nothing, torch.zeros(1, 2, dtype=torch.long))
    assert found.tolist() == [[0.0, 0.0]]
