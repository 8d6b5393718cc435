"""Models: loading, freezing, log-probabilities, tiny ones for trials."""
