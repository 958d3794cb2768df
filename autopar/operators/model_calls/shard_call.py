"""`autopar.shard`, which a model's forward calls; `annotation.py` parses its layouts."""

from __future__ import annotations

import torch
from torch import Tensor

# The result shares its operand's storage, like a view, so that a write into one of them is a write
# into the other, as outside autopar. The operator is a composite of one that has shapes and a
# derivative, so it needs none of its own. It is registered here, outside any trace.
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("shard(Tensor(a) x, str layout) -> Tensor(a)")
_LIBRARY.impl("shard", lambda x, layout: torch.ops.aten.alias(x), "CompositeImplicitAutograd")


def shard(x: Tensor, layout: str) -> Tensor:
    """Returns `x`, for which autopar will use `layout`; for use inside a model's forward.

    `layout` has an entry for each dimension, "[b@data, s, ?]":

        b@data      split over the mesh axis data, b@data@tensor over both, data outermost
        s           not split; any word is allowed, but a number must be the dimension's size
        ?           open: the planner may split it over axes that the annotation does not name
        ?@data      split over data; the planner may split each part over further axes

    The gradient has the same layout. "+sum(axis)" after the bracket marks the value as a partial
    sum along an axis, and "-sum(axis)" the gradient.

    The annotation takes effect where the result is read, not where `x` itself is. Outside autopar,
    in eager mode and under torch.compile, the result is `x` itself and nothing is done or checked.

    Returns:
        `x`. If the layout does not fit, capturing the model raises the errors of
        `Annotation.layouts` in `annotation.py`.
    """
    if not torch.compiler.is_exporting():
        return x
    marked: Tensor = torch.ops.autopar.shard(x, layout)
    return marked
