"""Runs the stages of a pipeline: rows of actions, messages between stages, tied parameters."""
