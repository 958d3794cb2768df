"""Execution of graphs in torch, and autopar's own operators."""
