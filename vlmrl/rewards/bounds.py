"""The numbers that a reward may be."""

from __future__ import annotations

import math

MAX_REWARD = 1e9
"""Squares of rewards, and their sums over a batch, must fit into float32."""


def problem_of_reward(reward: float) -> str | None:
    """Return what is wrong with a number as a reward, to be said after the number; None if nothing is."""
    if not math.isfinite(reward):
        return "which is not a finite number"
    if abs(reward) > MAX_REWARD:
        return f"and a reward is at most {MAX_REWARD:,.0f}"
    return None
