"""The reward of both sides of compare_trl.py: something that differs between answers and costs nothing."""


def share_of_letters(response: str) -> float:
    """How much of an answer of 64 characters would be letters."""
    return sum(character.isalpha() for character in response) / 64
