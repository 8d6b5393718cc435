"""Keep secrets out of what people and services are shown: those of the environment, and those in URLs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vlmrl.system.environment_variables import secret_values

MASK = "•••"
_USER = re.compile(r"(?<=://)[^/?#\s\"'<>]+@")
_URL = re.compile(r"(?<=://)[^\s\"'<>]+")
# Names are bounded: a text that repeats such a word for long would take a time that is quadratic in its length.
_PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w-]{0,64}[_-])?(?:api|access|auth|client|id|private|session)?"
    r"(?:key|keys|token|access|secret|password|passwd|pwd|auth|authorization|sig|signature|credentials?)"
    r"(?:[_-][\w-]{0,64})?=)[^&#;]+"
)
_OF_12_WITH_DIGIT = r"(?=[\w.~+/=-]{12})(?=[a-z_.~+/=-]{0,200}\d)"
_HEADER = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token)\s+|"
    rf"{_OF_12_WITH_DIGIT})|\bbearer\s+{_OF_12_WITH_DIGIT})[^\s\"'<>,;]+"
)


def mask_urls(text: str) -> str:
    """Replace user and password, and parameters that look like keys, in all URLs of a text; and HTTP credentials.

    Other text stays: responses hold code and prose, such as `?author=Dickens` or `signal=5`.
    """
    # Looking for what every match holds is many times as fast as a search.
    if "://" in text:
        text = _USER.sub(f"{MASK}@", text)
        text = _URL.sub(lambda url: _PARAMETER.sub(rf"\1{MASK}", url[0]), text)
    lower = text.lower()
    return _HEADER.sub(rf"\1{MASK}", text) if "authorization" in lower or "bearer" in lower else text


class Mask:
    """Replaces the values of environment variables that hold secrets, in text before it becomes part of a page.

    Names and numbers stay: a secret that equals one would break the page, and does not show that it is a secret.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = secret_values(environment)
        # Text may hold JSON, as settings and calls of tools do.
        forms = [
            form
            for value in values
            for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
        ]
        self._pattern = re.compile("|".join(map(re.escape, forms))) if forms else None

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def strings(self, value: Any) -> Any:
        """Return JSON data whose strings hold no secrets, and no users and keys in URLs."""
        if isinstance(value, str):
            return mask_urls(self.text(value))
        if isinstance(value, Mapping):
            return {name: self.strings(item) for name, item in value.items()}
        return [self.strings(item) for item in value] if isinstance(value, list | tuple) else value

    def tokens(self, tokens: Sequence[str]) -> list[str]:
        """Return the tokens of a text without secrets, which may reach over several: the first one is replaced."""
        text = "".join(tokens)
        own = [] if self._pattern is None else [match.span() for match in self._pattern.finditer(text)]
        spans = _merged([*own, *_spans_of_urls(text)])
        masked: list[str] = []
        start = number = 0
        for token in tokens:
            end = start + len(token)
            while number < len(spans) and spans[number][1] <= start:
                number += 1
            near = [begin for begin, _ in spans[number : number + 2] if begin < end]
            masked.append(token if not near else MASK if near[-1] >= start else "")
            start = end
        return masked


def _spans_of_urls(text: str) -> Iterator[tuple[int, int]]:
    """The parts of a text that `mask_urls` replaces."""
    for match in _USER.finditer(text):
        yield match.start(), match.end() - 1
    of_urls = (match for url in _URL.finditer(text) for match in _PARAMETER.finditer(text, *url.span()))
    for match in (*of_urls, *_HEADER.finditer(text)):
        yield match.end(1), match.end()


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, of which none overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
