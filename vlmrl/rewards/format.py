"""Reward 1 if the response has the requested format, regardless of its content.

There are two formats. If the prompt mentions `<answer>`, it is R1's: `<think>...</think>`, then `<answer>...</answer>`,
and nothing else. Otherwise the response must contain a `\\boxed{...}`, or have R1's format anyway.
"""

from vlmrl.rewards.boxed import last_boxed

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def score(prompt: str, response: str) -> float:
    """1.0 or 0.0. Empty tags and an empty box do not count. A `<think>` at the prompt's end opens the response."""
    opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
    if _is_tagged(opened + response):
        return 1.0
    return float("<answer>" not in prompt and bool(last_boxed(response)))


def _is_tagged(text: str) -> bool:
    """Each tag once, in order and not empty; only white space before, between and after them."""
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    start, think_end, answer_start, end = (text.index(tag) for tag in _TAGS)
    if not start < think_end < answer_start < end:
        return False
    outside = text[:start] + text[think_end + len("</think>") : answer_start] + text[end + len("</answer>") :]
    thought, answer = text[start + len("<think>") : think_end], text[answer_start + len("<answer>") : end]
    return not outside.strip() and bool(thought.strip()) and bool(answer.strip()) and last_boxed(answer) != ""
