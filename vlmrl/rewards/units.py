"""The value and the unit of a quantity: `12 cm`, `\\$36`, `145^\\circ`, `5 \\text{ m}^2`, `5:30 pm`."""

import re
from typing import NamedTuple

_ALIASES = {
    "m": "meter meters metre metres",
    "cm": "centimeter centimeters centimetre centimetres",
    "mm": "millimeter millimeters millimetre millimetres",
    "dm": "decimeter decimeters decimetre decimetres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "mi/h": "mph",
    "km/h": "kmh kmph kph",
    "ha": "hectare hectares",
    "acre": "acres",
    "g": "gram grams gm",
    "mg": "milligram milligrams",
    "kg": "kilogram kilograms kgs",
    "t": "tonne tonnes",
    "lb": "lbs",
    "oz": "ounce ounces",
    "s": "sec secs second seconds",
    "ms": "millisecond milliseconds",
    "min": "mins minute minutes",
    "h": "hr hrs hour hours",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "am": "a.m",
    "pm": "p.m",
    "l": "liter liters litre litres",
    "ml": "milliliter milliliters millilitre millilitres",
    "cl": "centiliter centiliters",
    "gal": "gallon gallons",
    "°": "deg degree degrees",
    "rad": "radian radians",
    "$": "dollar dollars usd us$",
    "€": "euro euros eur",
    "£": "gbp",
    "¥": "yen yuan jpy cny",
    "₹": "rupee rupees inr",
    "¢": "cent cents",
}
_SYMBOLS = {name: unit for unit, names in _ALIASES.items() for name in (unit, *names.split())}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}

_SPACE = r"(?:\s|\\[,;:!\s]|~|\\quad)*"
_POWER = r"(?:\^?\{?([23])\}?|([²³]))?"
_WRAPPED = re.compile(
    rf"{_SPACE}\\(?:text|textrm|textit|textbf|mathrm|mathit|mbox|operatorname)\s*\{{([^{{}}]*)\}}{_POWER}"
)
_BARE = re.compile(rf"{_SPACE}([A-Za-z][A-Za-z./ ]*?|[€£¥₹¢]|\\\$|\$){_POWER}")
_DEGREES = re.compile(rf"{_SPACE}(?:\^?\{{?\\circ\}}?|\\degree|°|º){_SPACE}(?:\\(?:text|mathrm)\{{\s*)?([CF]?)\}}?")
_DEGREE_WORDS = re.compile(r"degrees? (celsius|fahrenheit|c|f)", re.IGNORECASE)
_PREFIX = re.compile(rf"([+-]?)\s*(\\\$|\$|US\\?\$|[€£¥₹]){_SPACE}(?=[.0-9])")
_COMMANDS = re.compile(r"\\(?:d|t)?frac|\\sqrt|\\pi|\\times|\\cdot|\\[,;:!]|\\left|\\right")
_LONGEST = 200
_TAIL = 40


class Measure(NamedTuple):
    """A value and its unit."""

    value: str
    """The text without its unit if the unit is certain: a single letter (`2m`) may be a variable, and is kept."""
    unit: str | None
    """The unit's canonical name; None without a known unit."""


def measure(text: str) -> Measure:
    """Split the text. Only a number has a unit: `2x + 3m` has none.

    Examples: `12 cm` -> (`12`, `cm`), `\\$36` -> (`36`, `$`), `5 \\text{ sq ft}` -> (`5`, `ft^2`),
    `four` -> (`four`, None).
    """
    if len(text) > _LONGEST:
        return Measure(text, None)
    if prefix := _PREFIX.match(text):
        value, unit = measure(prefix.group(1) + text[prefix.end() :])
        currency = _SYMBOLS[prefix.group(2).strip("\\US")]
        return Measure(value, currency) if _is_number(value) and unit in (None, currency) else Measure(text, None)
    for start in _ends_of_value(text):
        value, tail = text[:start].rstrip(), text[start:]
        if not _is_number(value):
            continue
        unit, is_certain = _unit(tail)
        if unit is not None:
            return Measure(value if is_certain else text, unit)
    return Measure(text, None)


def last_unit(text: str) -> str | None:
    """Return the unit of the number that ends a sentence: `the rod is 12 cm` -> `cm`; None without one."""
    numbers = list(re.finditer(r"(?:\\?\$)?[0-9][0-9.,:/]*", text[-_TAIL:]))
    return measure(text[-_TAIL:][numbers[-1].start() :].rstrip(".")).unit if numbers else None


def agree(one: str | None, other: str | None) -> bool:
    """Whether two values can be compared: a missing unit agrees with any, and degrees with °C and °F."""
    if one is None or other is None or one == other:
        return True
    return "°" in (one, other) and one[0] == other[0]


def _ends_of_value(text: str) -> list[int]:
    """Positions where a unit may start: after a digit, a bracket or a constant."""
    return [match.end() for match in re.finditer(r"[0-9](?![0-9.,]*[0-9])|\}|\)|\\pi(?![A-Za-z])", text)]


def _is_number(text: str) -> bool:
    """The text is a number, a fraction, a root or a clock time, without a variable."""
    return (
        bool(text)
        and re.search(r"[0-9]|\\pi", text) is not None
        and not re.search(r"[^\W\d_]", _COMMANDS.sub("", text))
    )


def _unit(tail: str) -> tuple[str | None, bool]:
    """(canonical unit, whether it is certain) of the text after a number."""
    if degrees := _DEGREES.fullmatch(tail):
        return "°" + degrees.group(1), True
    if wrapped := _WRAPPED.fullmatch(tail):
        return _with_power(_canonical(wrapped.group(1)), wrapped), True
    if bare := _BARE.fullmatch(tail):
        name = bare.group(1)
        unit = _with_power(_canonical(name), bare)
        return unit, len(name) > 1 or not name.isalpha()
    return None, False


def _with_power(unit: str | None, match: re.Match[str]) -> str | None:
    power = match.group(2) or {"²": "2", "³": "3"}.get(match.group(3) or "")
    return unit if unit is None or power is None else f"{unit}^{power}"


def _canonical(phrase: str) -> str | None:
    """`square centimeters` -> `cm^2`, `meters per second` -> `m/s`; None if one of the words is not a unit."""
    phrase = _DEGREE_WORDS.sub(lambda degrees: "°" + degrees.group(1)[0].upper(), phrase.replace("\\$", "$").strip())
    if phrase in ("°C", "°F"):
        return phrase
    sides = [_side(side.split()) for side in re.split(r"\s*/\s*|\sper\s", phrase)]
    if len(sides) > 2 or None in sides:
        return None
    return "/".join(str(side) for side in sides)


def _side(words: list[str]) -> str | None:
    powers: list[tuple[str, int]] = []
    ahead = 1
    for word in words:
        plain = (word if len(word) == 1 else word.lower()).strip(".")
        plain = "l" if plain == "L" else plain
        if plain in _POWERS:
            ahead = _POWERS[plain]
        elif plain in _POWERS_AFTER and powers:
            powers[-1] = (powers[-1][0], _POWERS_AFTER[plain])
        elif plain in _SYMBOLS:
            powers.append((_SYMBOLS[plain], ahead))
            ahead = 1
        else:
            return None
    return " ".join(unit if power == 1 else f"{unit}^{power}" for unit, power in sorted(powers)) or None
