"""Environments that users bring, and the conversations of a policy with them."""

from vlmrl.agents.environment import Reply, tool

__all__ = ["Reply", "tool"]
