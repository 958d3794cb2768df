"""Integer programs for the problem that remains after reductions and bounds."""
