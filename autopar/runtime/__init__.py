"""The runtime of generated programs, which import `api.py` only."""
