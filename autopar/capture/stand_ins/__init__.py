"""Replacements for operations that torch.export cannot trace as they are written."""
