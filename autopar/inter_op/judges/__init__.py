"""Judges of rows: no deadlock, and no weights overwritten while they are needed."""
