"""Integer programs on what reductions and bounds leave."""
