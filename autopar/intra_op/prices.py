"""What is known of a mesh's prices, from one problem to the next.

Problems of stages, and of one model with more or fewer blocks computed again, ask the same of the
same devices: the cheapest ways between layouts, and what the states of a parameter take.
"""

from __future__ import annotations

from autopar.cost.model import Checked, CostModel
from autopar.intra_op.options import Lies, Option, parameter_options
from autopar.intra_op.stored import StoredTraffic, stored_traffic
from autopar.ir.collective import Resharder
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.tensor import TensorType

Stored = tuple[tuple[Option, ...], tuple[StoredTraffic, ...]]


class Prices:
    """Prices on one mesh.

    Args:
        mesh: the devices.
        model: prices, in seconds.
    """

    def __init__(self, mesh: Mesh, model: CostModel) -> None:
        self.mesh, self.model = mesh, Checked(model)
        self._resharders: dict[tuple[tuple[str, str], ...], Resharder] = {}
        self._stored: dict[tuple[TensorType, bool, Lies | None, int, Precision], Stored] = {}

    def resharder(self, precision: Precision) -> Resharder:
        """The cheapest ways between layouts in a precision."""
        key = tuple(precision.widened.items())
        if key not in self._resharders:
            self._resharders[key] = Resharder(self.mesh, self.model.collective, precision.widened)
        return self._resharders[key]

    def stored(
        self,
        tensor: TensorType,
        trained: bool,
        lies: Lies | None,
        bucket: int,
        precision: Precision,
    ) -> Stored:
        """Every choice of a parameter, and what each one sends and holds; see `stored.py`.

        Raises:
            CostError: a price that is negative or not finite.
        """
        key = (tensor, trained, lies, bucket, precision)
        if key not in self._stored:
            options = parameter_options(tensor, self.mesh, trained, lies)
            self._stored[key] = (
                options,
                tuple(
                    stored_traffic(
                        tensor, trained, option.storage, self.mesh, self.model, bucket, precision
                    )
                    for option in options
                    if option.storage is not None
                ),
            )
        return self._stored[key]
