"""Optimizer state and activations kept in host memory while they are not needed."""
