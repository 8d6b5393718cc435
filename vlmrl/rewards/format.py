"""1 when the answer has the form that was asked for, whatever it says.

There are two forms. Where the prompt speaks of `<answer>`, it is R1's: `<think>...</think>`, then
`<answer>...</answer>`, and nothing else. Otherwise the answer must hold a `\\boxed{...}`, or have R1's form anyway.
"""

from vlmrl.rewards.boxed import last_boxed

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def score(prompt: str, response: str) -> float:
    """1.0 or 0.0. Empty tags, and an empty box, say nothing. A `<think>` at the prompt's end counts as opened."""
    opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
    if _is_tagged(opened + response):
        return 1.0
    return float("<answer>" not in prompt and bool(last_boxed(response)))


def _is_tagged(text: str) -> bool:
    """Each tag once, in order, with something in it; nothing but white space before, between and after the parts."""
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    start, think_end, answer_start, end = (text.index(tag) for tag in _TAGS)
    if not start < think_end < answer_start < end:
        return False
    outside = text[:start] + text[think_end + len("</think>") : answer_start] + text[end + len("</answer>") :]
    thought, answer = text[start + len("<think>") : think_end], text[answer_start + len("<answer>") : end]
    return not outside.strip() and bool(thought.strip()) and bool(answer.strip()) and last_boxed(answer) != ""
