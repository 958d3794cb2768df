"""Optimizer state and activations that lie in host memory while nothing needs them."""
