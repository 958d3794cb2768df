"""Attention over parts of the keys or of the heads, shared by the forms of attention."""
