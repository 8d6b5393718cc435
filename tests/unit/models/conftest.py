"""Micro models, samples and adapters."""

from adapted_models import logprobs_of  # noqa: F401
from micro_models import folder, group, net, reader, sample  # noqa: F401
