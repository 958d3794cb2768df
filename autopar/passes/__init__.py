"""Passes that transform a captured graph into the graph that is planned."""
