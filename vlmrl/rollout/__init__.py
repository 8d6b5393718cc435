"""Generation. The only door to vLLM."""
