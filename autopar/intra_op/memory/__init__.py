"""Lifetimes and sizes of the tensors of a training step."""
