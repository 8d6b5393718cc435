"""Normalization of characters that look and mean the same: accents composed, full-width forms as ASCII."""

import unicodedata

_NARROW = str.maketrans({wide: chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)} | {0x3000: " "})
_LONGEST = 4096
"""Limit of characters: Unicode normalization takes quadratic time, and no final answer is longer."""


def same_characters(text: str) -> str:
    """Return the text in Unicode's composed form (NFC), with full-width letters, digits and signs as ASCII.

    Examples: `e` + U+0301 -> `é`, `４２％` -> `42%`. Not NFKC, which turns x² into x2. In a text of more than
    4,096 characters accents stay as they are.
    """
    if text.isascii():
        return text
    text = text.translate(_NARROW)
    return unicodedata.normalize("NFC", text) if len(text) <= _LONGEST else text
