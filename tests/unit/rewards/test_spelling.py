import pytest

from vlmrl.rewards.spelling import bracket_of, is_words, option_of, plain, same_words


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("$4$", "4"),
        ("\\(4\\)", "4"),
        ("$$\\text{red}$$.", "red"),
        ("\\text{red.}", "red"),
        ("A.", "A"),
        (".", "."),
        ("$36", "$36"),
        ("$1$ and $2$", "$1$ and $2$"),
        ("3√2", "3\\sqrt{2}"),
        ("√(x+1)", "\\sqrt{x+1}"),
        ("x²", "x^{2}"),
        ("−4", "-4"),
        ("pi", "\\pi"),
        ("π", "\\pi"),
        ("infinity", "\\infty"),
        ("\\boxed{4}", "\\boxed{4}"),
    ],
)
def test_one_label_matches_several_spellings(text: str, spelled: str) -> None:
    assert plain(text) == spelled


def test_words_and_names_are_not_parsed() -> None:
    for text in ("ab", "red circle", "mother-in-law", "don't know", "H2O", "x1", "B2", "日本"):
        assert is_words(text), text
    for text in ("x", "2x", "a+b", "sqrt2", "12", "3:30", "a b", "f(x)", "\\pi", "1e5", ""):
        assert not is_words(text), text


def test_words_are_compared_letter_by_letter() -> None:
    assert same_words("Red  Circle", "red circle")
    assert same_words("a \\cdot b", "ab")
    assert not same_words("ba", "ab")
    assert not same_words("redcircle", "red circle")


@pytest.mark.parametrize(
    ("text", "bracket"),
    [
        ("(1, 2)", "("),
        ("\\left( 1, 2 \\right)", "("),
        ("\\{1, 2\\}", "{"),
        ("\\left\\{ (1, 2), (3, 4) \\right\\}", "{"),
        ("1, 2", None),
        ("(4)", None),
        ("(1, 2) \\cup (3, 4)", None),
        ("[1, 2)", None),
    ],
)
def test_the_bracket_of_a_list_is_recognised(text: str, bracket: str | None) -> None:
    assert bracket_of(text) == bracket


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        *[("B. 12 cm", "B"), ("(B) 12 cm", "B"), ("B) 12", "B"), ("B: the red one", "B"), ("B", None)],
        *[("A. 5 or B. 6", None), ("A. B", None), ("A:B", None), ("(A)", None), ("A and B", None), ("x. 5", None)],
    ],
)
def test_a_written_out_option_matches_its_letter(text: str, letter: str | None) -> None:
    assert option_of(text) == letter
