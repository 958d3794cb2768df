"""Reads and writes files, and checks their entries.

| to see | read |
|---|---|
| how folders and files appear whole or not at all | `atomic.py` |
| how a kind of file is read within limits and written | `kinds.py` |
| how entries of files and arguments of functions are checked | `checked_values.py` |
"""
