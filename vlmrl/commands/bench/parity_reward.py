"""The reward of `vlmrl bench async` without an environment."""


def reward_func(response: str) -> float:
    """1 for a response of an even number of characters."""
    return float(len(response) % 2 == 0)
