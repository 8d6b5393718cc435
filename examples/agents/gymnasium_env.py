"""A Gymnasium environment: its rendered frame is the picture of each turn.

    pip install 'gymnasium[toy-text]'
    vlmrl rl --train.agent_func_path examples/agents/gymnasium_env.py:make ...

For another environment, copy this file, and change the name and the words of its actions.
"""

import re

from vlmrl.agents import Reply


class Gymnasium:
    """An environment of discrete actions. `words[k]` is the word for action k."""

    def __init__(self, name, words, question, **settings):
        try:
            import gymnasium
        except ImportError as error:
            raise ImportError("gymnasium is not installed: pip install 'gymnasium[toy-text]'") from error
        self.environment = gymnasium.make(name, render_mode="rgb_array", **settings)
        self.words, self.question = words, question

    def reset(self, seed):
        self.environment.reset(seed=seed % 2**32)
        return [self.environment.render(), f"{self.question} Answer {', '.join(self.words)}."]

    def step(self, response):
        said = [word for word in re.findall(r"\w+", response.lower()) if word in self.words]
        if not said:
            return Reply([self.environment.render(), f"Answer {', '.join(self.words)}."])
        _, reward, terminated, truncated, _ = self.environment.step(self.words.index(said[-1]))
        return Reply([self.environment.render(), self.question], float(reward), terminated or truncated)

    def close(self):
        self.environment.close()


def make():
    return Gymnasium("FrozenLake-v1", ["left", "down", "right", "up"], "Which way to the gift?", is_slippery=False)
