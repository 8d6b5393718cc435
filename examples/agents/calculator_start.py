"""The start of `tools_tiny.yaml`: a tiny Qwen3 whose chat template shows tools, questions, and demonstrations.

    python examples/agents/calculator_start.py runs/tools_tiny

Most demonstrations say the result without a call, as data from before the calculator would. One in eight calls it.
"""

import itertools
import json
import random
import sys
from pathlib import Path

from vlmrl.models.tiny import build

SHOWN = "Tools: calculate(expression)"
TOOLS = """\
{%- if tools %}
  {{- '<|im_start|>system\\nTools:' }}
  {%- for tool in tools %}
    {{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
"""
"""Shows tools as `SHOWN`. In Qwen3's own words they would take 800 tokens of a model whose tokens are characters."""


def questions() -> list[dict]:
    """Return all products of two numbers of two digits, in random order."""
    pairs = list(itertools.product(range(11, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    return [{"input": f"{one} * {two}", "label": str(one * two)} for one, two in pairs]


def demonstrations(question: dict, *, calls: bool) -> list[dict]:
    """Return a response to a question, and one to the result of a call."""
    expression, result = question["input"], question["label"]
    call = f'[calculate(expression="{expression}")]'
    asked = [{"role": "system", "content": SHOWN}, {"role": "user", "content": expression}]
    called = [*asked, {"role": "assistant", "content": call}, {"role": "tool", "content": result}]
    first = call if calls else f"{expression} = {result}"
    return [{"input": asked, "answer": first}, {"input": called, "answer": result}]


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    build("qwen3", folder / "start")
    template = folder / "start" / "chat_template.jinja"
    template.write_text(TOOLS + template.read_text())
    held_out, asked, demonstrated = (questions()[i:j] for i, j in ((0, 256), (256, 2256), (2256, None)))
    rows = [row for i, one in enumerate(demonstrated) for row in demonstrations(one, calls=i % 8 == 0)]
    write(folder / "demonstrations.jsonl", rows)
    write(folder / "questions.jsonl", asked)
    write(folder / "held_out.jsonl", held_out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
