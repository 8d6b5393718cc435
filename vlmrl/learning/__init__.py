"""Training. The only door to DeepSpeed."""
