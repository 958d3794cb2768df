"""Everything that generated programs import from autopar."""

from autopar.operators import kernels
from autopar.operators.own_functions import find_all
from autopar.runtime.parameters.pieces import Piece
from autopar.runtime.recompute import keep_products, keeping, repeatable
from autopar.runtime.runtime import received, stored, together

__all__ = [
    "Piece",
    "find_all",
    "keep_products",
    "keeping",
    "kernels",
    "received",
    "repeatable",
    "stored",
    "together",
]
