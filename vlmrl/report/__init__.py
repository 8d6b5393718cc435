"""The report of a run: one HTML file to look at, without a network."""
