"""The cheapest sequences of steps from one layout to another."""

from autopar.ir.resharding.resharder import Resharder
from autopar.ir.resharding.reshardings import Reshardings

__all__ = ["Resharder", "Reshardings"]
