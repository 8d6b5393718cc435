"""`vlmrl report`: make the page of one or several runs, or serve it while they go on."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vlmrl.config.report import ReportConfig
from vlmrl.errors import ConfigError
from vlmrl.report.page import write_report
from vlmrl.report.server import serve
from vlmrl.system.plain_text import print_line
from vlmrl.system.storage import format_bytes, writing


def report(config: ReportConfig) -> None:
    """Write the page, or serve it until Ctrl-C.

    Raises:
        ConfigError: a folder holds no run, or the port is taken.
        StorageError: the page cannot be written.
    """
    settings = config.report
    runs = [Path(run).expanduser() for run in settings.runs]
    if len({run.absolute() for run in runs}) < len(runs):
        raise ConfigError("report.runs: a folder is given twice: give each once")
    if settings.serve:
        serve(runs, port=settings.port, max_mib=settings.max_mib)
        return
    out = _output(settings.output, runs)
    with writing(out.name, out.parent):
        size = write_report(runs, out, max_mib=settings.max_mib)
    print_line(Console(), f"{out} ({format_bytes(size)})")


def _output(given: str | None, runs: list[Path]) -> Path:
    if given is None:
        return runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    out = Path(given).expanduser()
    if out.is_dir():
        return out / "report.html"
    if not out.parent.is_dir():
        raise ConfigError(f"report.output: there is no folder {out.parent}: make it, or give another file")
    return out
