"""Products on layers of square grids, each of which multiplies a part of the contracted elements.

Solomonik & Demmel, "Communication-Optimal Parallel 2.5D Matrix Multiplication and LU Factorization
Algorithms" (Euro-Par 2011): with more layers, each layer sends fewer bytes; the products of the
layers are summed.
"""

from __future__ import annotations

from autopar.operators.panels.grid_forms import grid_forms

NEEDS = (
    "the layouts of 2d, and further axes that split the contracted elements of both operands, of "
    "more or fewer devices than a side"
)
FORMS = grid_forms("2.5d", lambda side, depth: depth not in (1, side), NEEDS, "cpu: z=3, y=2, x=2")
