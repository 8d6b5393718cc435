"""The report of runs: one page to look at."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from vlmrl.config.base import PositiveFloat, Section, Text, Unread
from vlmrl.config.verb_base import VerbConfig


def with_runs(words: Sequence[str]) -> list[str]:
    """Return the words after `vlmrl report` as flags: the folders that come first are `report.runs`.

    Example: `a b --serve` is `--report.runs a b --report.serve`.
    """
    num_runs = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    flags = ["--report.serve" if word == "--serve" else word for word in words[num_runs:]]
    return ["--report.runs", *words[:num_runs], *flags] if num_runs else flags


class Report(Section):
    """The page and its contents."""

    runs: tuple[Text, ...] = ()
    """Output folders of runs, finished or not: the words after `vlmrl report`. Several are shown over each other."""
    output: Text | None = None
    """File to write; by default report.html in the run's folder, and with several runs in the current folder."""
    max_mib: PositiveFloat = Field(default=15.0, ge=1.0)
    """Largest size of the page. Responses and images that do not fit are left out, evenly over the run."""
    serve: bool = False
    """Instead of a file, serve the page on loopback, made anew while a run goes on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to serve on; 0 chooses a free one."""


class ReportConfig(VerbConfig):
    """Runs to look at: curves, responses beside their images, checks and settings, in one page without a network."""

    verb: ClassVar[str] = "report"

    report: Report

    def conflicts(self) -> list[str]:
        if self.report.runs:
            return []
        return ["report.runs names no run: give the output folder of one, as in vlmrl report runs/quickstart/rl"]

    def unread(self) -> Unread:
        if self.report.serve:
            return {"report.output": "with report.serve no file is written"}
        return {"report.port": "there is no server without report.serve"}
