"""A custom reward: a function of a response, which gets the arguments that it declares by name; also for a server."""


def close_counts(response: str, label: str) -> float:
    """1 for the right number, 1/2 for the next one, 1/3 for the one after it; 0 for what is no number.

    It may declare response, label, prompt, metadata, images.
    """
    said = response.strip()
    return 1.0 / (1 + abs(int(said) - int(label))) if said.isdecimal() and said.isascii() else 0.0
