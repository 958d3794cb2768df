"""Products on a square grid of devices, whose blocks are gathered in panels (SUMMA).

Inputs, weights and results are all split over both sides of the grid (van de Geijn & Watts, "SUMMA:
Scalable Universal Matrix Multiplication Algorithm", 1997; Xu et al., "An Efficient 2D Method for
Training Super-Large Deep Learning Models", arXiv:2104.05343). With a further axis that splits rows,
this is the 2.5D of Tesseract (Wang et al., arXiv:2105.14500), in which the weight is replicated
along that axis.
"""

from __future__ import annotations

from autopar.operators.panels.grid_forms import grid_forms

NEEDS = (
    "x split by rows and contracted columns, and the weight by columns and contracted rows, over "
    "the same two axes of equally many devices"
)
FORMS = grid_forms("2d", lambda side, depth: depth == 1, NEEDS)
