"""Write the resolved settings as a YAML file that repeats the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vlmrl.config.base import Section
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import RlConfig

HEADER = "# Written by vlmrl: "
"""The beginning of the file. Recipes begin with their command, `# vlmrl rl --config ...`."""


def dump_yaml(config: VerbConfig, path: Path) -> None:
    """Write every setting with its value; `vlmrl VERB --config PATH` repeats the run.

    A setting that the run does not read is a comment with the reason, because the run would refuse it as a setting.
    A value that follows from other settings stays `null`, with the current value as a comment.
    """
    lines = [f"{HEADER}vlmrl {config.verb} --config {path.name} repeats the run", *_lines(config, config, "", depth=0)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(config: VerbConfig, section: Section, prefix: str, *, depth: int) -> Iterator[str]:
    unread = config.unread()
    indent = "  " * depth
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            if prefix + name in config.sections():
                yield f"{indent}{name}:"
                yield from _lines(config, value, f"{prefix}{name}.", depth=depth + 1)
        elif prefix + name in config.omits:
            continue
        elif prefix + name in unread:
            yield f"{indent}# {name}: {inline(value)}  # not read: {unread[prefix + name]}"
        else:
            resolved = _resolved(config, prefix + name) if value is None else None
            yield f"{indent}{name}: {inline(value)}" + (f"  # {resolved}" if resolved is not None else "")


def inline(value: Any) -> str:
    """Format a setting's value as one line of YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    # In single quotes a line break would be one in the file, too, and end a comment.
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(plain, default_flow_style=True, default_style=style, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _resolved(config: VerbConfig, name: str) -> object:
    """Return the value of an unset setting in this run; None if there is no default to show."""
    if not isinstance(config, RlConfig):
        return None
    meanings = {
        **{f"critic.{name}": value for name, value in config.resolved_critic},
        "algo.loss_agg": config.aggregation,
        "rollout.max_tokens_per_gpu": config.train.max_tokens_per_gpu,
        "ref.model_name_or_path": "the actor, adapters off"
        if config.reference_is_base
        else config.actor.model_name_or_path,
    }
    return meanings.get(name)
