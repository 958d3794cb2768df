"""Which torch the tests run with."""

from __future__ import annotations

import torch

# Some operators have no derivative, or no trace, before this version.
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
