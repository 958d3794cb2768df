"""The search on what reductions leave large: memory at a price, then kicks."""
