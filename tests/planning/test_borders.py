"""Messages between stages, wherever in the cluster the stages are."""

from __future__ import annotations

from autopar.cost.model import AnalyticModel
from autopar.ir.crossing import Side, crossing
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.planning.pipelines.borders import Messages


def test_the_busiest_rank_of_each_pair_of_stages() -> None:
    """Pairs far apart move as much as a crossing says, as do pairs that share ranks."""
    part, value = Mesh.parse("H100: node=2, gpu=2"), TensorType("bf16", (8, 6))
    layouts = (Layout((("node",), ())), Layout((("gpu",), ("node",))), Layout(((), ())))
    messages = Messages(Mesh.parse("H100: node=8, gpu=2"), AnalyticModel)
    starts = ((0, 4), (8, 12), (12, 4), (4, 4), (0, 2))
    for source in layouts:
        for target in layouts:
            for here, there in starts:
                one = Side(part, tuple(range(here, here + 4)), source)
                other = Side(part, tuple(range(there, there + 4)), target)
                expected = 2 * crossing(value, one, other).busiest
                assert messages.busiest(value, one, other) == expected
