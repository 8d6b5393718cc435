"""Training. The only package that imports DeepSpeed."""
