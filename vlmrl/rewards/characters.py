"""Brings characters that look the same and mean the same to one: accents composed, full-width forms as ASCII."""

import unicodedata

_NARROW = str.maketrans({wide: chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)} | {0x3000: " "})
_LONGEST = 4096
"""Putting marks in order takes quadratic time, and a longer text is nobody's answer."""


def same_characters(text: str) -> str:
    """The text in Unicode's composed form (NFC), with full-width letters, digits and signs as those of ASCII.

    Examples: `e` + U+0301 -> `é`, `４２％` -> `42%`. Not NFKC, for which x² is x2. In a text of more than 4,096
    characters accents stay as they are.
    """
    if text.isascii():
        return text
    text = text.translate(_NARROW)
    return unicodedata.normalize("NFC", text) if len(text) <= _LONGEST else text
