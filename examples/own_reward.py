"""A reward of one's own: a function of an answer, given by name what it declares, for a run or for a reward server."""


def close_counts(response: str, label: str) -> float:
    """1 for the right number, 1/2 for the next one, 1/3 for the one after it; 0 for what is no number.

    What it may declare: response, label, prompt, metadata, images.
    """
    said = response.strip()
    return 1.0 / (1 + abs(int(said) - int(label))) if said.isdecimal() and said.isascii() else 0.0
