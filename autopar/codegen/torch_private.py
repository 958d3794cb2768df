"""Every private or version-dependent corner of torch that the runtime needs, in one file.

A new release of torch that moves one of them breaks here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# torch 2.13 renamed the two; older releases know the older names only.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
