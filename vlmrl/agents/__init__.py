"""Conversations of the policy with environments and tools."""
