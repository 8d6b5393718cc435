import pytest

from vlmrl.rewards.final_answer import Final, final_answer


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("  4\n", Final("4", "whole")),
        ("so \\boxed{ 4 }.", Final("4", "box")),
        ("<think>1+1</think><answer> 4\n</answer>", Final("4", "tags")),
        ("<think>put it in <answer></answer></think><answer>4</answer>", Final("4", "tags")),
        ("<answer>4</answer> or <answer>5</answer>", Final("5", "tags")),
        ("<think>\\boxed{3}</think><answer>4</answer>", Final("4", "tags")),
        ("<think>\\boxed{3}</think><answer>\\boxed{4}</answer>", Final("4", "box")),
        ("<answer>4</answer> \\boxed{5}", Final("4", "tags")),
        ("<answer></answer>", Final("", "tags")),
        ("<answer>4", Final("<answer>4", "whole")),
        ("4</answer>", Final("4</answer>", "whole")),
        ("</answer>\\boxed{4}<answer>", Final("4", "box")),
    ],
)
def test_a_box_inside_tags_has_precedence(text: str, final: Final) -> None:
    assert final_answer(text) == final
