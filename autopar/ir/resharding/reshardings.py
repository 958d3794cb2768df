"""The resharders of one mesh under one price, kept from one use to the next."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.chosen_algorithms import LIBRARY_ONLY, ChosenAlgorithms
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.resharding.layout_graph import LayoutGraphs
from autopar.ir.resharding.resharder import Resharder


class Reshardings:
    """A price of collectives that remembers the cheapest steps between layouts.

    Whoever takes a price takes it as well, and finds known paths in `resharder`.

    Args:
        mesh: the devices.
        price: seconds of one collective.
        graphs: layouts and steps to share with other meshes.
    """

    def __init__(
        self,
        mesh: Mesh,
        price: Callable[[Collective], float],
        graphs: LayoutGraphs | None = None,
    ) -> None:
        self.mesh, self.price, self._graphs = mesh, price, graphs or LayoutGraphs()
        self._known: dict[tuple[tuple[tuple[str, str], ...], ChosenAlgorithms], Resharder] = {}

    def __call__(self, call: Collective, /) -> float:
        """Returns the seconds of a collective."""
        return self.price(call)

    @classmethod
    def of(cls, mesh: Mesh, price: Callable[[Collective], float]) -> Reshardings:
        """Returns `price` itself if it remembers the paths of this mesh."""
        known = isinstance(price, Reshardings) and price.mesh == mesh
        return price if known else cls(mesh, price)  # type: ignore[return-value]

    def resharder(self, precision: Precision, chosen: ChosenAlgorithms = LIBRARY_ONLY) -> Resharder:
        """Returns the resharder for a precision, whose calls name chosen algorithms."""
        key = tuple(precision.widened.items()), chosen
        if key not in self._known:
            named = chosen.named if chosen else None
            self._known[key] = Resharder(
                self.mesh, self.price, precision.widened, named, self._graphs
            )
        return self._known[key]
