"""A text game: find a number from 1 to 100 by guessing.

vlmrl rl --train.agent_func_path examples/agents/text_game.py:make ...
"""

import random
import re

from vlmrl.agents import Reply


class Guess:
    """The reward of the right number falls with the guesses that it took."""

    def reset(self, seed):
        self.number = random.Random(seed).randint(1, 100)
        self.num_guesses = 0
        return "I have a number from 1 to 100. Guess it. I say if mine is higher or lower."

    def step(self, response):
        self.num_guesses += 1
        numbers = re.findall(r"\d+", response)
        if not numbers:
            return Reply("That is no number. Guess again.")
        guess = int(numbers[-1][:9])
        if guess == self.number:
            return Reply(reward=1 / self.num_guesses, done=True)
        return Reply(f"Mine is {'higher' if self.number > guess else 'lower'}. Guess again.")


def make():
    return Guess()
