"""The settings of a run. Importing this package never imports torch."""
