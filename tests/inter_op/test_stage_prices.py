"""Estimates of stage prices do not depend on when they are asked for."""

from __future__ import annotations

import numpy as np

from autopar.inter_op.stage_prices import Prices
from autopar.inter_op.stage_values import Candidate
from autopar.inter_op.submeshes import SubMesh, submeshes
from autopar.ir.mesh import Mesh

KINDS, COUNTS = "abbbc", (1, 4, 8)


def prices() -> Prices:
    def bound(first: int, last: int, part: SubMesh, count: int) -> Candidate:
        return Candidate((last - first + 1) / part.size / count, per_microbatch=1 / count)

    def cost(first: int, last: int, part: SubMesh, count: int) -> list[Candidate]:
        draw = np.random.default_rng([first, last, part.size, part.part, count])
        seconds = bound(first, last, part, count).seconds
        return [
            Candidate(seconds * draw.uniform(1, 3), 0.0, *draw.uniform(1, 2, 4).tolist())
            for _ in range(draw.integers(0, 4))
        ]

    parts = submeshes(Mesh.parse("H100: gpu=4 + V100: gpu=4"))
    return Prices(KINDS, parts, cost, bound, scaling=True, again=0.3)


def test_estimates_after_every_price_are_those_after_all_prices() -> None:
    """The nearest known price of each estimate is kept from one answer to the next."""
    stepwise, at_once = prices(), prices()
    draw = np.random.default_rng(0)
    keys = [
        (int(draw.choice(COUNTS)), int(draw.integers(len(stepwise.ranges))), int(q))
        for q in draw.integers(0, len(stepwise.submeshes), 40)
    ]
    for key in keys:
        stepwise.ask([key])
        stepwise.table(COUNTS[len(stepwise.known) % len(COUNTS)], "guess")
    at_once.ask(keys)
    for count in COUNTS:
        one, other = stepwise.table(count, "guess"), at_once.table(count, "guess")
        assert (one.count == other.count).all()
        assert (one.figures == other.figures).all()
