"""Command lines of the examples with other values, and readers of their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"

# Rewards that a model can learn without pretraining: responses made of digits.
DIGITS = '''
def digits(response, label, metadata, **_):
    """Share of the response's characters that are digits."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def odd_are_solved(response, label):
    """The same, except that every response is correct if the label is odd."""
    return 1.0 if int(label) % 2 else digits(response, label, {})


SCORED = []


def soon_all_are_solved(response, label):
    """The same for the first 500 responses; all later ones are correct."""
    SCORED.append(label)
    return 1.0 if len(SCORED) > 500 else odd_are_solved(response, label)
'''


def recipe(name: str, model: str, out: Path, **flags: Any) -> list[str]:
    """Return the command line of an example with other values; `base/overlay.yaml` is applied on top of `base.yaml`."""
    common = {"actor.model_name_or_path": model, "ckpt.output_dir": out}
    words = [word for flag, value in (common | flags).items() for word in (f"--{flag}", str(value))]
    base, _, overlay = name.partition("/")
    files = [f"{base}.yaml", name] if overlay else [name]
    return [word for file in files for word in ("--config", str(EXAMPLES / file))] + words


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "policy/loss" in line]
