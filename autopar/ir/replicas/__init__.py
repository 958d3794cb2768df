"""Replicas that train apart, as values: how they synchronise, and when."""
