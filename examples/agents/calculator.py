"""Products that need a calculator: the reward is for the right result after a call of the tool.

    vlmrl rl --train.agent_func_path examples/agents/calculator.py:make ...

With a dataset, the question and the label are those of the row, and a row without a label is refused; with the dataset
`episodes`, the environment makes its own questions.
"""

import ast
import operator
import random
import re

from vlmrl.agents import Reply, tool

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


class Calculator:
    """One question. A response without a call of the tool is the result."""

    def reset(self, row, seed):
        self.has_called = False
        if row is not None:
            self.label = row.get("label")
            if self.label is None:
                raise ValueError("the row has no label to compare results with: set data.label_key to its column")
            return None  # the row's own prompt
        one, two = random.Random(seed).choices(range(11, 100), k=2)
        self.label = str(one * two)
        return f"What is {one} * {two}? Use the calculator, then say the result."

    def step(self, response):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
        is_right = self.has_called and bool(numbers) and numbers[-1] == str(self.label)
        return Reply(reward=float(is_right), done=True)

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an expression of numbers, brackets and + - * / // %."""
        result = value(ast.parse(expression[:200], mode="eval").body)
        self.has_called = True
        return str(result)


def value(node):
    """The value of a parsed expression."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError("only numbers, brackets and + - * / // % are allowed")


def make():
    return Calculator()
