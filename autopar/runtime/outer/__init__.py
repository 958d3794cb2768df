"""Replicas that train independently: rounds, outer methods, and the programs that use them."""
