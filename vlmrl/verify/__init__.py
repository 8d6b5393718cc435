"""Checks during a run: engine and trainer agree, adapters reach the engines, models see the images."""
