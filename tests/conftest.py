"""Loaded before any test, and before torch is."""

import os

# Tensors are tiny and workers share the cores: threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
