"""Captures a torch model as a Graph: traces it, undoes in-place writes, refuses what it cannot."""
