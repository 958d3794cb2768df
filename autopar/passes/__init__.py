"""Passes that turn a captured graph into the one that is planned."""
