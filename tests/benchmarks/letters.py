"""Rewards of the benchmarks: something that differs between answers, and costs nothing or only time."""

import time

DELAY_S = 0.05


def share_of_letters(response: str) -> float:
    """How much of an answer of 64 characters would be letters."""
    return sum(character.isalpha() for character in response) / 64


def after_a_while(response: str) -> float:
    """The same, said by somebody who takes 50 ms and no core for it, as a server or another machine does."""
    time.sleep(DELAY_S)
    return share_of_letters(response)
