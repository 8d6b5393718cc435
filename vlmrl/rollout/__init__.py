"""Rollouts. vLLM is imported here and in `vlmrl doctor` alone."""
