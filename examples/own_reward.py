"""A custom reward: a function of a response that receives the arguments it declares by name, also in a server."""


def close_counts(response: str, label: str) -> float:
    """1 / (1 + distance to the right number); 0 if the response is not a number.

    A reward may declare response, label, prompt, metadata, images.
    """
    number = response.strip()
    return 1.0 / (1 + abs(int(number) - int(label))) if number.isdecimal() and number.isascii() else 0.0
