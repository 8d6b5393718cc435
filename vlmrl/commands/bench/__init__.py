"""`vlmrl bench`: repeatable measurements, to compare machines and settings. One JSON object per line."""
