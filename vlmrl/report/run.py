"""What a run's folder says about the run, apart from its transcripts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.config.names import settings as fields_of
from vlmrl.config.verb_list import VERBS
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError
from vlmrl.observe.lock import is_held
from vlmrl.observe.run_folder import RunFolder
from vlmrl.report.run_files import read_facts, read_parameters, read_records, read_settings, read_text

_VERB = re.compile(r"# Written by vlmrl: vlmrl ([\w -]+?) --config")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the run."""

    name: str
    value: str
    default: str | None
    """None: there is no default."""
    is_changed: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, read once."""

    folder: RunFolder
    name: str
    verb: str
    """`rl`, `sft`, ...; empty for a folder without settings."""
    config: Mapping[str, Any]
    """Full name -> value."""
    settings: Sequence[Setting]
    records: Sequence[Mapping[str, Any]]
    """Metrics by step, in order."""
    parameters: Sequence[tuple[str, int, int]]
    """(part, trainable, all)."""
    facts: Mapping[str, Any]
    """What the run wrote about itself: see `observe.facts`."""
    is_running: bool

    @property
    def step(self) -> int:
        """The last step with metrics."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def last_step(self) -> int | None:
        """The last step that the run may have made: `logger.logging_steps` leaves out some. None: it has no metrics."""
        interval = self.config.get("logger.logging_steps")
        return self.step + (interval - 1 if isinstance(interval, int) else 0) if self.records else None

    @property
    def trains(self) -> bool:
        """Whether its figures are of several steps of training."""
        return self.verb not in ("eval", "generate")

    @property
    def logprob_diff_limit(self) -> float:
        """Bound on the mean difference between log-probs of engine and trainer; infinity: there is none."""
        given = {name: self.config.get(f"vllm.{name}") for name in ("max_logprob_diff", "qlora_base", "quantization")}
        try:
            vllm = Vllm.model_validate({name: value for name, value in given.items() if value is not None})
        except ValueError:  # settings that were edited by hand
            vllm = Vllm()
        dtype, is_in_4bit = self.config.get("ds.param_dtype"), self.config.get("ds.load_in_4bit")
        return vllm.logprob_diff_limit(param_dtype=str(dtype), load_in_4bit=is_in_4bit is True)


def read_run(path: Path, *, name: str) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it is no run's folder.
    """
    folder = RunFolder(path)
    if not folder.root.is_dir():
        raise ConfigError(f"{path} is no folder: give the output folder of a run (ckpt.output_dir)")
    if not (folder.config.is_file() or folder.metrics.is_file()):
        raise ConfigError(f"{path} holds no run, neither {folder.config.name} nor {folder.metrics.name}")
    text = read_text(folder.config)
    match = _VERB.match(text)
    verb = match[1] if match else ""
    config = _flat(read_settings(text))
    return Run(
        folder=folder,
        name=name,
        verb=verb,
        config=config,
        settings=_settings(config, verb),
        records=read_records(folder.metrics),
        parameters=read_parameters(folder.parameters),
        facts=read_facts(folder.facts),
        is_running=is_held(folder.root),
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each folder: its last part, with as many before it as tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(p[-1:])} ({number})" for number, p in enumerate(parts, start=1)]


def _flat(section: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in section.items():
        # A mapping is a section, or the value of a setting: `reward.functions: {exact: 0.0}`.
        if isinstance(value, dict) and f"{prefix}{name}" not in _MAPPINGS:
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None or not _is_section(f"{prefix}{name}"):
            flat[f"{prefix}{name}"] = value
    return flat


_MAPPINGS = {name for verb in VERBS for name in verb.settings()}
_SECTIONS = {name for verb in VERBS for name in verb.sections()}


def _is_section(name: str) -> bool:
    return name in _SECTIONS


def _settings(config: Mapping[str, Any], verb: str) -> list[Setting]:
    kind = next((kind for kind in VERBS if kind.verb == verb), None)
    fields = fields_of(kind) if kind else {}
    rows = []
    for name, value in config.items():
        field = fields.get(name)
        has_default = field is not None and not field.is_required()
        default = field.get_default(call_default_factory=True) if field is not None and has_default else None
        rows.append(
            Setting(name, _shown(value), _shown(default) if has_default else None, _plain(value) != _plain(default))
        )
    return rows


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
