"""Calls of a program: the batch that it is given, the program that takes it, and its results."""
