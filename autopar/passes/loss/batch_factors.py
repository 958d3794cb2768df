"""Distinguishes factors of a loss that depend on the size of the batch from constants.

A captured graph contains sizes as numbers, so `loss.sum() / len(x)` and `loss.sum() / 100` look the
same. A second graph, of twice as many samples, distinguishes them: only numbers that depend on the
size differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import AutoparError
from autopar.ir.executed.library_kernels import base
from autopar.ir.graph import Graph, Node
from autopar.passes.loss.means import is_whole_mean

# Factor of the larger batch over that of the batch -> power of the number of samples.
_POWERS = {1.0: 0, 2.0: 1, 0.5: -1}


@dataclass(frozen=True)
class BatchFactors:
    """The factors of one graph.

    Attributes:
        graph: graph of one microbatch.
        capture: returns the graph of twice as many samples; called at most once, if needed.
    """

    graph: Graph
    capture: Callable[[], Graph]

    @cached_property
    def _larger(self) -> Graph | None:
        try:
            return self.capture()
        except AutoparError:
            return None

    def power(self, node: Node) -> int | None:
        """Returns the power of the number of samples in the number by which a node multiplies.

        It is 0 for a constant, -1 for a division by the number of samples or of all elements, and
        None if it is unknown.
        """
        factor = _factor(node)
        if factor is None:
            return 0
        if is_whole_mean(self.graph, node):
            return -1
        if self._larger is None or node.name not in self._larger:
            return None
        other = _factor(self._larger[node.name])
        if other is None or self._larger[node.name].op != node.op:
            return None
        ratio = other / factor
        return next((p for r, p in _POWERS.items() if math.isclose(r, ratio, rel_tol=1e-9)), None)

    def may_depend(self, node: Node) -> bool:
        """Returns whether a number, or its inverse, is a multiple of the number of samples."""
        factor = _factor(node)
        return factor is not None and any(map(self._multiple, (abs(factor), 1 / abs(factor))))

    def constant(self, node: Node) -> bool:
        """Returns whether the numbers that a node reads are the same for any batch."""
        if not any(map(self._multiple, numbers(node))):
            return True
        larger = self._larger
        return larger is not None and node.name in larger and larger[node.name].args == node.args

    def grows(self, name: str) -> bool:
        """Returns whether a value has more elements in a larger batch; True if unknown."""
        if self._larger is None or name not in self._larger:
            return True
        return self._larger[name].type.shape != self.graph[name].type.shape

    def _multiple(self, value: float) -> bool:
        """Returns whether a positive number is a multiple of the number of samples."""
        leaves = (leaf.type for leaf in self.graph.leaves("input"))
        rows = {kind.shape[0] for kind in leaves if kind.shape and kind.numel}
        times = [value / count for count in rows]
        return any(round(one) > 0 and math.isclose(one, round(one)) for one in times)


def numbers(node: Node) -> list[float]:
    """Returns the sizes of the finite numbers, but for zero, among a node's arguments."""
    found = [abs(arg) for arg in node.args if isinstance(arg, (int, float))]
    return [float(one) for one in found if one and math.isfinite(one)]


def _factor(node: Node) -> float | None:
    """Returns the number by which an operator multiplies its only operand; None without one."""
    if base(node.op) not in ("mul", "div") or len(node.inputs) != 1:
        return None
    number = next((one for one in node.args if isinstance(one, (int, float))), 0)
    if not number or not math.isfinite(number):
        return None
    return float(number) if base(node.op) == "mul" else 1 / number
