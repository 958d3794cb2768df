"""A model that computes in float64 throughout, even where its code converts to float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _InDouble(TorchFunctionMode):
    """Whoever asks for float32 gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Exact(nn.Module):
    """A model that computes in float64 what it would convert to float32 on the way.

    Norms, rotary embeddings, routers and losses of transformers do so; two runs that add in another
    order would agree to 1e-7 only. The model's code is the library's own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, **batch: Any) -> Any:
        with _InDouble():
            return self.model(**batch)
