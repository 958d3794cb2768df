"""Captures a torch model as a Graph: traces it, and refuses code that a trace would lose."""
