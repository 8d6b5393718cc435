"""Rewards of the benchmarks: they differ between responses, and take no time or a fixed time."""

import time

DELAY_S = 0.05


def share_of_letters(response: str) -> float:
    """The number of letters / 64."""
    return sum(character.isalpha() for character in response) / 64


def after_a_while(response: str) -> float:
    """The same after 50 ms in which no core is used, as with a server on another machine."""
    time.sleep(DELAY_S)
    return share_of_letters(response)
