"""Runs of the examples with other values, and what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"

# What no pretraining is needed for: answers made of digits.
DIGITS = '''
def digits(response, label, metadata, **_):
    """Share of the answer's characters that are digits."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def odd_are_solved(response, label):
    """The same, but that every answer is right where the label is odd."""
    return 1.0 if int(label) % 2 else digits(response, label, {})


ASKED = []


def soon_all_are_solved(response, label):
    """The same, until so many answers are scored: from then on all of them are right."""
    ASKED.append(label)
    return 1.0 if len(ASKED) > 500 else odd_are_solved(response, label)
'''


def recipe(name: str, model: str, out: Path, **flags: Any) -> list[str]:
    """The command line of an example with other values; `base/overlay.yaml` is laid over `base.yaml`."""
    common = {"actor.model_name_or_path": model, "ckpt.output_dir": out}
    words = [word for flag, value in (common | flags).items() for word in (f"--{flag}", str(value))]
    base, _, overlay = name.partition("/")
    files = [f"{base}.yaml", name] if overlay else [name]
    return [word for file in files for word in ("--config", str(EXAMPLES / file))] + words


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "policy/loss" in line]
