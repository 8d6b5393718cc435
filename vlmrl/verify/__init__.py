"""Checks of a run while it goes on: engine and trainer agree, adapters reach the engines, models see the images."""
