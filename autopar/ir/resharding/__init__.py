"""The cheapest sequences of steps from one layout to another."""

from autopar.ir.resharding.layout_graph import LayoutGraphs
from autopar.ir.resharding.resharder import Resharder
from autopar.ir.resharding.reshardings import Reshardings

__all__ = ["LayoutGraphs", "Resharder", "Reshardings"]
