"""Prompts, images, packing and balance."""
