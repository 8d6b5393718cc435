"""The environment of examples/agents/steer.py for a policy that cannot see what comes of its moves."""

from pathlib import Path

from vlmrl.system.user_function import load_function

STEER = Path(__file__).parents[2] / "examples" / "agents" / "steer.py"
Small = load_function(f"{STEER}:make_small", "train.agent_func_path")
Steer = type(Small())


class FirstPicture(Steer):
    """Repeats the episode's first picture."""

    first = None

    def picture(self):
        if self.first is None:
            self.first = super().picture()
        return self.first


class ConstantPicture(Steer):
    """Shows the same picture in every turn of every episode."""

    def picture(self):
        at, goal = self.at, self.goal
        self.at, self.goal = (0, 0), (self.side - 1, self.side - 1)
        try:
            return super().picture()
        finally:
            self.at, self.goal = at, goal


def first_picture():
    return FirstPicture(cell=14)


def constant_picture():
    return ConstantPicture(cell=14)
