"""Make one HTML page of one or several runs, within a number of bytes."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from vlmrl import __version__
from vlmrl.observe.metrics import logged_steps
from vlmrl.observe.registry import describe, metrics
from vlmrl.report.checks import checks
from vlmrl.report.curves import curves
from vlmrl.report.embedding import embedded, embedded_size
from vlmrl.report.overview import headlines, phases, tokens_per_s
from vlmrl.report.rollouts import shown_rollouts
from vlmrl.report.run import Run, names_of, read_run
from vlmrl.report.symptoms import symptoms
from vlmrl.system.masking import Mask

_ASSETS = files("vlmrl.report") / "assets"
_SCRIPTS = ("dom", "charts", "overview", "curves", "conversation", "rollouts", "settings", "start")
_MAX_POINTS = (1000, 500, 200, 60)
"""Points of a curve: fewer where the page would be too large."""
_CURVES_SHARE = 0.3
"""Largest part of a small page that curves may take."""
_MAX_SIDE = 448
"""Longest side of an image, in pixels."""


def write_report(paths: Sequence[Path], out: Path, *, max_mib: float, follow_s: float | None = None) -> int:
    """Write the page of these runs to `out` and return its size in bytes. It replaces an older one atomically.

    Args:
        follow_s: the page reloads itself in this interval while a run goes on.

    Raises:
        ConfigError: a folder holds no run.
        OSError: the page cannot be written.
    """
    page = report(paths, max_mib=max_mib, follow_s=follow_s)
    data = page.encode()
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return len(data)


def report(paths: Sequence[Path], *, max_mib: float, follow_s: float | None = None) -> str:
    """Return the page of these runs; see `write_report`."""
    mask = Mask(os.environ)
    runs = [read_run(path, name=mask.text(name)) for path, name in zip(paths, names_of(paths), strict=True)]
    title = ", ".join(run.name for run in runs)
    room = int(max_mib * 2**20) - len(_render("", title=title).encode())
    return _render(_data(runs, mask, max_bytes=room, follow_s=follow_s), title=title)


def _data(runs: Sequence[Run], mask: Mask, *, max_bytes: int, follow_s: float | None) -> str:
    """The page's data as JSON: all but the responses first, then as many responses as there is room for."""
    described = [_described(run, mask) for run in runs]
    data = {
        "made": time.time(),
        "version": __version__,
        "follow_s": follow_s if any(run.is_running for run in runs) else None,
        "metrics": _metrics(runs),
        "runs": described,
    }
    for max_points in _MAX_POINTS:
        for record, run in zip(described, runs, strict=True):
            record |= {"curves": curves(run.records, max_points=max_points)}
            record |= {"groups": [], "images": {}, "changes": {}, "notes": []}
        if embedded_size(data) < _CURVES_SHARE * max_bytes:
            break
    room = (max_bytes - embedded_size(data)) // len(runs)
    for record, run in zip(described, runs, strict=True):
        shown = shown_rollouts(run.folder.rollouts, max_bytes=room, max_side=_MAX_SIDE, mask=mask, until=run.last_step)
        record |= {"groups": shown.groups, "images": shown.images, "changes": shown.changes, "notes": shown.notes}
    return embedded(data)


def _metrics(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What each metric of the runs is, by its name."""
    names = sorted({name for run in runs for record in run.records for name in record} - {"step"})
    infos = {name: info for name in names if (info := describe(name)) is not None}
    places = {info.name: place for place, info in enumerate(metrics())}
    return {
        name: {
            "meaning": info.meaning.replace("`", ""),
            "unit": info.unit,
            "better": info.better,
            "group": info.group,
            "place": places[info.name],
        }
        for name, info in infos.items()
    }


def _described(run: Run, mask: Mask) -> dict[str, Any]:
    num_logged, num_steps = logged_steps(run.records)
    return {
        "name": run.name,
        "verb": run.verb,
        "step": run.step,
        "total_steps": run.facts.get("total_steps"),
        "status": _status(run, mask),
        "headlines": [headline._asdict() for headline in headlines(run)],
        "checks": [check._asdict() for check in checks(run)],
        "warnings": [symptom._asdict() for symptom in symptoms(run.records)],
        "phases": phases(run.records),
        "logged_steps": num_logged,
        "steps": num_steps,
        "tokens_per_s": tokens_per_s(run.records),
        "settings": [
            {
                "name": s.name,
                "value": mask.strings(s.value),
                "default": mask.strings(s.default),
                "changed": s.is_changed,
            }
            for s in run.settings
        ],
        "parameters": run.parameters,
        "facts": mask.strings(run.facts),
    }


def _status(run: Run, mask: Mask) -> dict[str, str]:
    """`state` is one of running, finished, stopped, failed."""
    end = run.facts.get("end")
    if run.is_running and not end:
        return {"state": "running", "text": "running"}
    if end and end.get("state") in ("finished", "stopped", "failed"):
        reason = str(end.get("reason") or "")
        return {"state": str(end["state"]), "text": str(end["state"]), "reason": mask.strings(reason)}
    # A run of a version without facts. Where facts lack an end, a model may be of an earlier run of fewer steps.
    has_result = any(model.exists() for model in (run.folder.model, run.folder.adapter))
    if not run.facts and (has_result or not run.trains):
        return {"state": "finished", "text": "finished"}
    return {"state": "stopped", "text": "ended before it was finished"}


def _render(data: str, *, title: str) -> str:
    """Fill the template. A policy in the page forbids every request, and every script but the page's own."""
    script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    scripts = [_asset("vendor/uPlot.iife.min.js").strip(), f'(function () {{\n"use strict";\n{script}\n}})();']
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; "
        "form-action 'none'"
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_asset("page.html.j2")).render(
        title=title,
        policy=policy,
        styles=[Markup(_asset("vendor/uPlot.min.css")), Markup(_asset("page.css"))],
        scripts=[Markup(text) for text in scripts],
        data=Markup(data),
    )


def _asset(name: str) -> str:
    return _ASSETS.joinpath(name).read_text(encoding="utf-8")
