"""Models: loading, freezing, attention, log-probabilities, adapters, memory estimates, tiny models for tests."""
