"""Frequencies of the experts of a mixture: equal, by Zipf's law, or as measured.

    "equal"              every expert as often as the others
    "zipf 0.8"           expert i in proportion to 1 / (i + 1) ** 0.8, popular ones side by side
    "0.4 0.3 0.2 0.1"    these shares, normalised to sum to one

The busiest device determines the time. If experts are split over devices, it has `imbalance` times
as many rows as under equal load (the same figure as "max / mean load" in Wang et al.,
"Auxiliary-Loss-Free Load Balancing", arXiv:2408.15664, plus one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autopar.errors import OptionError
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.mixture import MIXTURE

LOAD = "load"  # a keyword of the operator, for prices only
AMONG = "among"  # likewise: the number of experts that tokens choose from, if some are elsewhere
PRICED = (LOAD, AMONG)
_EXPERTS = 2**16


@dataclass(frozen=True)
class ExpertLoad:
    """A distribution of tokens over experts; prints as the text that `parse` reads.

    Attributes:
        exponent: exponent of Zipf's law; 0 means equal load.
        measured: the share of each expert; empty for Zipf's law.
    """

    exponent: float = 0.0
    measured: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ExpertLoad:
        """Parses the text of a distribution; raises OptionError for anything else."""
        words = text.split()
        try:
            if words in ([], ["equal"]):
                return cls()
            if words[0] == "zipf" and len(words) == 2:
                return cls(_number(words[1]))
            if len(words) <= _EXPERTS:
                shares = tuple(map(_number, words))
                if sum(shares) > 0:
                    return cls(0.0, tuple(share / math.fsum(shares) for share in shares))
        except ValueError:
            pass
        raise OptionError(
            f"cannot read the load of experts {text[:50]!r}",
            todo='write "equal", "zipf 0.8", or a share for each expert, "0.4 0.3 0.2 0.1"',
        )

    def __str__(self) -> str:
        if self.measured:
            return " ".join(f"{share:.6g}" for share in self.measured)
        return f"zipf {self.exponent:g}" if self.exponent else "equal"

    def shares(self, experts: int) -> tuple[float, ...]:
        """Returns each expert's share of the rows; the shares sum to one.

        Raises:
            OptionError: the load was measured for another number of experts.
        """
        if self.measured and len(self.measured) != experts:
            raise OptionError(
                f"a load of {len(self.measured)} experts is given",
                why=f"the model has a mixture of {experts}",
                todo="pass a share for each of them",
            )
        weights = self.measured or [(i + 1.0) ** -self.exponent for i in range(experts)]
        return tuple(weight / math.fsum(weights) for weight in weights)

    def imbalance(self, experts: int, axes: Sequence[str], mesh: Mesh) -> float:
        """Returns the rows of the busiest device, relative to those of an average device.

        Args:
            experts: number of experts.
            axes: the axes that split the experts, outermost first.
            mesh: the devices.
        """
        parts = self.parts(experts, axes, axes, mesh)
        return max(parts) * len(parts)

    def parts(
        self, experts: int, axes: Sequence[str], along: Sequence[str], mesh: Mesh
    ) -> list[float]:
        """Returns the share of the rows of each group of devices with equal coordinates.

        Args:
            experts: number of experts.
            axes: the axes that split the experts, outermost first.
            along: the axes among these whose coordinates define a group.
            mesh: the devices.
        """
        shares, layout = self.shares(experts), Layout((tuple(axes),))
        parts: dict[tuple[int, ...], float] = {}
        for place in product(*(range(mesh.axis_size(axis)) for axis in axes)):
            at = dict(zip(axes, place, strict=True))
            ((start, length),) = layout.bounds((experts,), mesh, at)
            group = tuple(at[axis] for axis in along)
            parts[group] = parts.get(group, 0.0) + math.fsum(shares[start : start + length])
        return list(parts.values())


def load_of(node: Node) -> ExpertLoad:
    """Returns the load that a mixture's prices assume."""
    text = node.keyword(LOAD)
    return ExpertLoad.parse(text if isinstance(text, str) else "equal")


def imbalance(node: Node, up: TensorType, layout: Layout, mesh: Mesh) -> float:
    """Returns the imbalance of a mixture's devices.

    Args:
        node: the mixture.
        up, layout: type and layout of the weights of its experts.
        mesh: the devices.
    """
    axes, own = layout.dims[0], 1.0
    if axes:  # rows that choose none of the experts are left out
        own = up.shape[0] / among(node, up)
    if node.keyword(LOAD) is None:
        return own
    return own * load_of(node).imbalance(up.shape[0], axes, mesh)


def among(node: Node, up: TensorType) -> int:
    """Returns the number of experts that the tokens of a mixture choose from.

    Args:
        node: the mixture.
        up: type of the weights of its experts.
    """
    count = node.keyword(AMONG)
    return count if isinstance(count, int) else up.shape[0]


def part_shares(
    node: Node, up: TensorType, layout: Layout, mesh: Mesh
) -> Callable[[Sequence[str]], list[float]]:
    """Returns a function from axes to the shares of the groups that these axes define.

    Choices of experts that are none of the mixture's have the rest.
    """
    load, axes, own = load_of(node), layout.dims[0], up.shape[0] / among(node, up)
    return lambda along: [own * s for s in load.parts(up.shape[0], axes, along, mesh)]


def with_load(graph: Graph, load: ExpertLoad) -> Graph:
    """Returns `graph` with mixtures whose prices assume a load.

    Raises:
        OptionError: the load was measured for another number of experts.
    """
    nodes = []
    for node in graph.nodes:
        if node.op == MIXTURE:
            load.shares(graph[node.inputs[0]].type.shape[0])
            node = replace(node, kwargs=(*node.kwargs, (LOAD, str(load))))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _number(word: str) -> float:
    value = float(word)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return value
