"""Environments and agents that users bring, and the conversations of a policy with them."""

from vlmrl.agents.environment import Reply, Task, tool

__all__ = ["Reply", "Task", "tool"]
