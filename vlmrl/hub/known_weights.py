"""Tell models whose weights this process has written from those of earlier processes of the run."""

from __future__ import annotations

from pathlib import Path

from vlmrl.hub.base_model import CARD
from vlmrl.observe.run_folder import RunFolder
from vlmrl.system.atomic_folders import partial

_Weights = tuple[tuple[str, int, int], ...]
"""(name, time of the last change in ns, bytes) of each file. Inodes are not stable on every file system."""


class KnownWeights:
    """The weights that a run's folder held when a process of the run began.

    A run that resumes keeps the models of its earlier processes until it writes new ones. How many steps they were
    trained for, only their own cards know.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        # A process that is killed while it replaces a model leaves it under its partial name; the next one renames it.
        self._known = {_weights(path) for folder in run.models for path in (folder, partial(folder))}

    def needs_card(self, folder: Path) -> bool:
        """Whether the card of a model is to be written: it has new weights, or none says which step they are from."""
        weights = _weights(folder)
        if folder == self._run.best and not (folder / CARD).exists():  # whose step is in best.json
            return weights != ()
        return weights not in self._known | {()}


def _weights(folder: Path) -> _Weights:
    files = sorted(folder.glob("*.safetensors"))
    return tuple((file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)
