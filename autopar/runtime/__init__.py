"""The runtime of generated programs; `api.py` is all that they import."""
