"""Calls of a program: its batch, the program for that batch, and the results."""
