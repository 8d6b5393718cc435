"""Micro models and samples."""

from micro_models import folder, group, net, reader, sample  # noqa: F401
