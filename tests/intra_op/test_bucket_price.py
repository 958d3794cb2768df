"""Whether gradients of many owners share a call: the price of copies against that of calls."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.cost.work import Work
from autopar.intra_op.storage_choices import bucket_by_price, bucket_of
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support.models import mlp, squared_error

SIZES = (64, 64, 32, 8)


@dataclass
class Linear:
    """A call takes `call` seconds and `byte` for each byte, a copied byte `copy`."""

    call: float
    copy: float
    byte: float = 1e-9

    def collective(self, sent: Collective, /) -> float:
        return self.call + self.byte * sent.nbytes

    def compute(self, work: Work) -> float:
        return self.copy * work.nbytes


@pytest.mark.parametrize(
    ("call", "copy", "expected"),
    [
        (1e-3, 1e-12, "all that go"),
        (1e-12, 1e-3, "each by itself"),
    ],
)
def test_dear_calls_are_shared_and_dear_copies_avoided(
    call: float, copy: float, expected: str
) -> None:
    model, batch = mlp(SIZES, 8)
    options = Options(loss_fn=squared_error)
    graph = capture_graph(model, (), batch, options, Trace(None)).graph
    found = bucket_by_price(graph, Mesh.parse("cpu: gpu=4"), Linear(call, copy))
    sizes = [leaf.type.nbytes for leaf in graph.leaves("param") if leaf.requires_grad]
    if expected == "each by itself":  # the last one need not fill a bucket
        assert found <= min(sizes[:-1])
    else:
        assert min(sizes) < found == bucket_of(graph)


def test_of_all_sizes_the_cheapest_is_taken() -> None:
    """A bias waits for the matrix behind it if the copy of both takes less than a call."""
    model, batch = mlp(SIZES, 8)
    graph = capture_graph(model, (), batch, Options(loss_fn=squared_error), Trace(None)).graph
    sizes = [leaf.type.nbytes for leaf in graph.leaves("param") if leaf.requires_grad]
    prices = Linear(1e-5, 1e-9)

    def by_hand(bucket: int) -> float:
        rows: list[list[int]] = [[]]
        for size in sizes:
            rows[-1].append(size)
            if sum(rows[-1]) >= bucket:
                rows.append([])
        sent = [row for row in rows if row]
        copied = sum(2.5 * sum(row) for row in sent if len(row) > 1)
        return 1e-5 * len(sent) + 1e-9 * sum(sizes) + 1e-9 * copied

    found = bucket_by_price(graph, Mesh.parse("cpu: gpu=4"), prices)
    best = min(
        map(by_hand, [bucket_of(graph), *(4**n for n in range(12) if 4**n < bucket_of(graph))])
    )
    assert by_hand(found) == pytest.approx(best)
