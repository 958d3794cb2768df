"""Derives a graph for any batch size from traces on two: sizes grow with the number of samples.

A search for pipelines needs many microbatch sizes, and tracing takes longer than pricing. Sizes
that do not grow in proportion are refused. A batch of one sample must be traced itself, since
tracing may choose other operators for dimensions of size 1.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.passes.verify import verify

Value = TypeVar("Value")


def rebatch(few: Graph, many: Graph, samples: tuple[int, int], wanted: int) -> Graph:
    """Returns the graph of a model on `wanted` samples.

    Args:
        few, many: graphs of the same model on two batches.
        samples: sizes of these batches, at least two each.
        wanted: at least two.

    Raises:
        GraphError: the graphs differ in more than sizes that grow in proportion to the samples.
    """
    if min(*samples, wanted) < 2 or samples[0] == samples[1]:
        raise _unlike(f"graphs of {samples} samples tell nothing of one of {wanted}")
    return verify(_between(few, many, samples, wanted))


def _between(few: Value, many: Value, samples: tuple[int, int], wanted: int) -> Value:
    """Returns a value for `wanted` samples, given its values on two batches."""
    value: Any
    if type(few) is not type(many):
        raise _unlike(f"{few!r} and {many!r}")
    if isinstance(few, tuple):
        others = cast(tuple[Any, ...], many)
        if len(few) != len(others):
            raise _unlike(f"{few!r} and {many!r}")
        value = tuple(_between(a, b, samples, wanted) for a, b in zip(few, others, strict=True))
    elif is_dataclass(few) and not isinstance(few, type):
        value = type(few)(
            **{
                one.name: _between(getattr(few, one.name), getattr(many, one.name), samples, wanted)
                for one in fields(few)
                if one.init
            }
        )
    elif few == many:
        value = few
    elif (
        isinstance(few, int)
        and few * samples[1] == cast(int, many) * samples[0]
        and few * wanted % samples[0] == 0
    ):
        value = few * wanted // samples[0]
    else:
        raise _unlike(f"{few!r} and {many!r}")
    return cast(Value, value)


def _unlike(why: str) -> GraphError:
    return GraphError(
        "the graph does not grow in proportion to the batch",
        why=why,
        todo="trace the model on the desired batch",
    )
