"""Products on a cube of devices: each of the three matrices is communicated along one axis.

Agarwal et al., "A three-dimensional approach to parallel matrix multiplication" (IBM J. Res. Dev.
39, 1995); Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks"
(arXiv:2105.14450). Inputs and weights are gathered in panels. The results are summed along the
third axis, by a reduce_scatter if the next operator reads them split.
"""

from __future__ import annotations

from autopar.operators.panels.grid_forms import grid_forms

NEEDS = (
    "the layouts of 2d, and further axes that split the contracted elements of both operands, of "
    "as many devices as a side"
)
FORMS = grid_forms("3d", lambda side, depth: depth == side, NEEDS, "cpu: z=2, y=2, x=2")
