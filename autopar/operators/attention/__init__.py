"""Attention in parts of keys or of heads: what the forms of attention have in common."""
