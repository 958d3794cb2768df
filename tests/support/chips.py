"""Where tests train: on the CPU, or with AUTOPAR_TESTS_ON_GPU=1 on the first GPU."""

from __future__ import annotations

import os

import torch

ON_GPU = os.environ.get("AUTOPAR_TESTS_ON_GPU") == "1"
CHIP = torch.device("cuda" if ON_GPU and torch.cuda.is_available() else "cpu")
"""The device of programs in one process."""
MESH = "H100: gpu=1" if CHIP.type == "cuda" else "cpu: gpu=1"
