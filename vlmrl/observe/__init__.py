"""Progress, metrics, logs and output folder of a run."""
