"""The content of `\\boxed{...}` in a text, found in one pass over it, however long or malformed it is."""

import re

_TOKENS = re.compile(r"\\boxed\s*\{|\\[\\{}]|[{}]")


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, stripped; of nested boxes the inner one; None without a box.

    Escaped braces (`\\{`) are text. A box that is never closed, as in a truncated response, does not count.
    """
    opened: list[tuple[bool, int]] = []  # (is a box, start of its content)
    best: tuple[int, int] | None = None
    for token in _TOKENS.finditer(text):
        match token.group():
            case "{":
                opened.append((False, token.end()))
            case "}":
                is_box, start = opened.pop() if opened else (False, 0)
                if is_box and (best is None or start > best[0]):
                    best = (start, token.start())
            case "\\\\" | "\\{" | "\\}":
                pass
            case _:
                opened.append((True, token.end()))
    return None if best is None else text[slice(*best)].strip()
