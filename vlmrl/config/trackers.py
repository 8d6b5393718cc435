"""Experiment trackers, each off until its project is named. Keys come from the environment, never from settings."""

from vlmrl.config.base import Section, Unread


class Wandb(Section):
    """Weights & Biases; on when `project` is set. The key comes from the environment variable WANDB_API_KEY."""

    project: str | None = None
    """Project; None turns W&B off."""
    org: str | None = None
    """Team or user."""
    group: str | None = None
    """Group of runs."""
    run_name: str | None = None
    """Name of the run; by default the output folder's."""


class Mlflow(Section):
    """MLflow; on when `experiment` is set. The server comes from the environment variable MLFLOW_TRACKING_URI."""

    experiment: str | None = None
    """Experiment; None turns MLflow off."""
    run_name: str | None = None
    """Name of the run; by default the output folder's."""


class Trackio(Section):
    """Trackio; on when `project` is set. It is local unless the environment variable TRACKIO_SPACE_ID names a Space."""

    project: str | None = None
    """Project; None turns Trackio off."""
    run_name: str | None = None
    """Name of the run; by default the output folder's."""


class Swanlab(Section):
    """SwanLab; on when `project` is set. The key comes from the environment variable SWANLAB_API_KEY."""

    project: str | None = None
    """Project; None turns SwanLab off."""
    org: str | None = None
    """Workspace; by default the user's own."""
    run_name: str | None = None
    """Name of the run; by default the output folder's."""


def unread_of_trackers(wandb: Wandb, mlflow: Mlflow, trackio: Trackio, swanlab: Swanlab) -> Unread:
    unread: Unread = {}
    switches: tuple[tuple[str, str, str, str | None], ...] = (
        ("wandb", "W&B", "project", wandb.project),
        ("mlflow", "MLflow", "experiment", mlflow.experiment),
        ("trackio", "Trackio", "project", trackio.project),
        ("swanlab", "SwanLab", "project", swanlab.project),
    )
    sections: dict[str, type[Section]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio, "swanlab": Swanlab}
    for section, title, switch, value in switches:
        if value is None:
            reason = f"{title} is off without logger.{section}.{switch}"
            unread |= {f"logger.{section}.{name}": reason for name in sections[section].model_fields if name != switch}
    return unread
