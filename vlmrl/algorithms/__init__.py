"""Advantages, losses, KL and aggregation: pure functions of torch tensors."""
