"""A run whose roles and report record their calls, for tests of its checkpoints."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripted_loop import config

from vlmrl.observe.run_folder import RunFolder
from vlmrl.trainer.run_checkpoints import RunCheckpoints


class RecordingRole:
    """A role that records its calls, and writes empty folders."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.extra: dict[Path, dict[str, Any]] = {}
        self.damage: dict[str, list[str]] = {}
        """Checkpoint -> the damage of its files."""
        self.size = 1
        """Parameters."""

    def save_checkpoint(self, folder: Path, extra: dict[str, Any] | None = None) -> None:
        self.log.append(f"{self.name} {folder.name}")
        folder.mkdir(parents=True)
        self.extra[folder] = extra or {}

    def checkpoint_damage(self, folder: Path) -> list[str]:
        return self.damage.get(folder.name, [])

    def table(self) -> list[tuple[str, int, int]]:
        return [("language", self.size, self.size)]

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        self.log.append(f"{self.name} from {folder.name}")
        return self.extra[folder]

    def save_model(self, folder: Path) -> None:
        self.log.append(f"{self.name} model {folder.name}")
        folder.mkdir(parents=True, exist_ok=True)

    save_average = save_model

    def state(self) -> dict[str, int]:
        return {"position": 7}

    num_rows = 28

    def set_progress(self, share: float) -> None:
        self.log.append(f"{self.name} at {share}")

    def load_state(self, state: dict[str, int]) -> None:
        self.log.append(f"{self.name} {state}")


class RecordingReport:
    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Any:
        yield

    def say(self, what: object) -> None:
        self.lines.append(str(what))


ADAPTIVE = {"target": 0.1, "horizon": 1000}


def run_checkpoints(root: Path, log: list[str], *, kl: dict[str, Any] = ADAPTIVE, **changes: Any) -> RunCheckpoints:
    settings = config(
        algo={"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.5} | kl},
        ckpt={"save_steps": 2, "max_num": 1, "load_enable": True} | changes,
    )
    prompts, policy, critic = (RecordingRole(name, log) for name in ("prompts", "policy", "critic"))
    return RunCheckpoints(settings, RunFolder(root), prompts, policy, RecordingReport(), critic)  # type: ignore[arg-type]
