"""Rollouts. Only this package and `vlmrl doctor` import vLLM."""
