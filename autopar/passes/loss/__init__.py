"""Passes on the loss: means as sums over counts, and the counts of a whole batch."""
