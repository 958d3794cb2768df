"""Replicas that train apart: rounds, outer methods, and what a program with them does."""
