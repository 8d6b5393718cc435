import pytest

from vlmrl.rewards.units import Measure, agree, last_unit, measure


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("12 cm", "12", "cm"),
        ("12cm", "12", "cm"),
        ("12 centimeters", "12", "cm"),
        ("12\\text{ cm}", "12", "cm"),
        ("12~\\mathrm{cm}^2", "12", "cm^2"),
        ("12 cm^{2}", "12", "cm^2"),
        ("12 cm²", "12", "cm^2"),
        ("12 sq. cm", "12", "cm^2"),
        ("12 square centimeters", "12", "cm^2"),
        ("12 feet squared", "12", "ft^2"),
        ("12 m", "12 m", "m"),
        ("12 \\text{ m}", "12", "m"),
        ("12 meters", "12", "m"),
        ("60 km/h", "60", "km/h"),
        ("60 kilometers per hour", "60", "km/h"),
        ("60 mph", "60", "mi/h"),
        ("\\frac{1}{2} hours", "\\frac{1}{2}", "h"),
        ("36\\pi \\text{ cm}^3", "36\\pi", "cm^3"),
        ("145°", "145", "°"),
        ("145^\\circ", "145", "°"),
        ("145^{\\circ}", "145", "°"),
        ("145 degrees", "145", "°"),
        ("20^\\circ\\text{C}", "20", "°C"),
        ("20°F", "20", "°F"),
        ("20 degrees Celsius", "20", "°C"),
        ("\\$36", "36", "$"),
        ("$36", "36", "$"),
        ("-\\$36.50", "-36.50", "$"),
        ("36 dollars", "36", "$"),
        ("\\$36 dollars", "36", "$"),
        ("\\$36 cm", "\\$36 cm", None),
        ("US$ 1,000", "1,000", "$"),
        ("€ 36", "36", "€"),
        ("5 am", "5", "am"),
        ("5:30 p.m.", "5:30", "pm"),
        ("5 apples", "5 apples", None),
        ("50\\%", "50\\%", None),
        ("2x", "2x", None),
        ("4m^2n", "4m^2n", None),
        ("2x + 3m", "2x + 3m", None),
        ("x = 3 cm", "x = 3 cm", None),
        ("four cm", "four cm", None),
        ("cm", "cm", None),
        ("", "", None),
        ("$", "$", None),
    ],
)
def test_a_number_is_split_from_its_unit(text: str, value: str, unit: str | None) -> None:
    assert measure(text) == Measure(value, unit)


def test_a_missing_unit_matches_any() -> None:
    assert agree(None, "cm")
    assert agree("cm", None)
    assert agree("°", "°C")
    assert not agree("°C", "°F")
    assert not agree("cm", "cm^2")


def test_a_sentence_has_the_unit_of_the_number_that_ends_it() -> None:
    assert last_unit("The rod is 12 cm.") == "cm"
    assert last_unit("It costs \\$36.") == "$"
    assert last_unit("12 cm is what it measures") is None
    assert last_unit("no number") is None
