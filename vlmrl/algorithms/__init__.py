"""The mathematics: advantages, losses, KL, aggregation. Pure functions over torch tensors."""
