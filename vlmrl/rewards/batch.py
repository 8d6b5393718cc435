"""Reward functions with the signatures of TRL and OpenRLHF, which take a batch of responses.

TRL's:      def reward(completions, answer, **kwargs): return [1.0, ...]
OpenRLHF's: def reward_func(queries, prompts, labels): return {"rewards": ..., "scores": ..., "extra_logs": {...}}

A batch is the responses to one prompt (in `vlmrl serve-rm`, those that arrive together). TRL's functions get `prompts`,
`completions` and, by name, the columns of the row; the label is passed as `label`, by the name of its column and by the
usual names of one. In rows whose prompt is a list of messages, prompts and completions are lists of messages, too; in a
conversation with an environment a completion is all messages behind the prompt. OpenRLHF's get `queries` (prompt and
response, or the whole conversation, as one text), `prompts` and `labels`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vlmrl.errors import ConfigError
from vlmrl.system.user_function import Parameters

Style = Literal["trl", "openrlhf"]

_NOT_COLUMNS: Mapping[Style, frozenset[str]] = {
    "trl": frozenset({"prompts", "completions", "images"}),
    "openrlhf": frozenset({"queries", "prompts", "labels", "images"}),
}
"""The arguments of each style that are not columns of the row."""
LABELS = frozenset({"label", "labels", "answer", "answers", "solution", "ground_truth", "target"})
"""Usual names of the label, unless the row has another column of that name."""
TRL_ONLY = frozenset({"completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric"})
"""Arguments that only TRL's trainer can pass."""


class Signature(NamedTuple):
    """The arguments of a function with another library's signature."""

    style: Style
    names: frozenset[str]
    """Declared arguments."""
    required: frozenset[str]
    """Declared arguments that are columns of the row and have no default."""
    takes_all: bool
    """It has `**kwargs`, which receive all other columns."""

    def missing(self, *, label_keys: Collection[str], metadata: Mapping[str, Any]) -> str | None:
        """Return a required column that the row does not have, or None."""
        item = {"label_keys": label_keys, "metadata": metadata}
        return next((name for name in sorted(self.required) if not _has(name, item)), None)


def signature_of(parameters: Parameters, spec: str, *, setting: str) -> Signature | None:
    """Return the signature of a function of TRL or OpenRLHF with these parameters; None if it takes one response.

    Raises ConfigError if it requires arguments that only that library's trainer has.
    """
    if "completions" in parameters.names:
        style: Style = "trl"
    elif "queries" in parameters.names:
        style = "openrlhf"
    else:
        return None
    required = frozenset(parameters.required) - _NOT_COLUMNS[style]
    unknown = sorted(required if style == "openrlhf" else required & TRL_ONLY)
    if unknown:
        library = "TRL" if style == "trl" else "OpenRLHF"
        raise ConfigError(
            f"{setting}: {spec} has {library}'s signature and requires {', '.join(unknown)}, which vlmrl does not pass"
        )
    return Signature(style, parameters.names, required, parameters.takes_all)


def arguments(signature: Signature, items: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call: lists with one item per response.

    An item holds `prompt`, `response`, `query` (both as one text, or the whole conversation), `label`, `label_keys`
    (columns that are the label's) and `metadata`; and for prompts that are lists of messages `messages`, the first
    `num_prompt_messages` of which are the prompt's. `images` are PIL, per response.
    """
    if signature.style == "openrlhf":
        known: dict[str, list[Any]] = {
            "queries": [item["query"] for item in items],
            "prompts": [item["prompt"] for item in items],
            "labels": [item["label"] for item in items],
        }
        columns: set[str] = set()
    else:
        known = {
            "prompts": [_prompt(item) for item in items],
            "completions": [_completion(item) for item in items],
        }
        columns = set(signature.names)
        if signature.takes_all:
            columns |= {
                "label",
                *(name for item in items for name in item["label_keys"]),
                *(name for i in items for name in i["metadata"]),
            }
    if "images" in signature.names:
        known["images"] = list(images)
    for name in columns - known.keys():
        if any(_has(name, item) for item in items):
            known[name] = [_column(name, item) for item in items]
    names = known.keys() if signature.takes_all else known.keys() & signature.names
    return {name: known[name] for name in names}


def split_by_response(returned: Any, count: int, *, style: Style) -> list[Any]:
    """Split the returned rewards by response: a number, or a dict of numbers with one named `total`.

    None, TRL's reward that does not apply, counts as 0, as in TRL. Raises ValueError unless there is one reward
    per response.
    """
    if not isinstance(returned, Mapping):
        rewards = _column_of(returned, count, "rewards")
        return [0.0 if reward is None and style == "trl" else reward for reward in rewards]
    if "rewards" not in returned:
        raise ValueError(f"it returned a dict without 'rewards' (keys: {sorted(map(str, returned))})")
    columns = {"total": _column_of(returned["rewards"], count, "rewards")}
    if returned.get("scores") is not None:
        columns["scores"] = _column_of(returned["scores"], count, "scores")
    for name, values in (returned.get("extra_logs") or {}).items():
        is_scalar = not hasattr(_plain(values), "__len__")
        columns[str(name)] = [_plain(values)] * count if is_scalar else _column_of(values, count, str(name))
    # An invalid value that is only logged (the mean of nothing is NaN) must not invalidate the reward.
    rewards = columns.pop("total")
    return [
        {"total": reward} | {name: values[number] for name, values in columns.items() if _is_number(values[number])}
        for number, reward in enumerate(rewards)
    ]


def _column_of(values: Any, count: int, name: str) -> list[Any]:
    plain = _plain(values)
    if not isinstance(plain, list | tuple):
        raise ValueError(f"it returned {type(values).__name__} where a list of {name} is expected")
    # A tensor of [B, 1] also has one number per response.
    column = [v[0] if isinstance(v, list) and len(v) == 1 else v for v in plain]
    if len(column) != count:
        raise ValueError(f"it returned {len(column)} {name} for {count} responses")
    return column


def _is_number(value: Any) -> bool:
    """Whether the value is a finite number."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several raises the last
        return False


def _plain(values: Any) -> Any:
    """Convert tensors and arrays to lists or numbers."""
    return values.tolist() if hasattr(values, "tolist") else values


def _has(name: str, item: Mapping[str, Any]) -> bool:
    return name in item["metadata"] or _is_label(name, item)


def _column(name: str, item: Mapping[str, Any]) -> Any:
    return item["metadata"].get(name, item["label"] if _is_label(name, item) else None)


def _is_label(name: str, item: Mapping[str, Any]) -> bool:
    return name in LABELS or name in item["label_keys"]


def _prompt(item: Mapping[str, Any]) -> Any:
    return item["messages"][: item["num_prompt_messages"]] if "messages" in item else item["prompt"]


def _completion(item: Mapping[str, Any]) -> Any:
    return item["messages"][item["num_prompt_messages"] :] if "messages" in item else item["response"]
