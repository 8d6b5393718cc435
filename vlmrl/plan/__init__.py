"""Estimates of step time, and a search for placements: plain arithmetic without torch. See README.md."""
