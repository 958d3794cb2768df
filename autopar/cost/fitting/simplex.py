"""The simplex method of Nelder & Mead for functions of few variables without derivatives.

"A Simplex Method for Function Minimization", Computer Journal 7(4), 1965.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean


def simplex(
    loss: Callable[[Sequence[float]], float], begin: Sequence[float], size: float, rounds: int
) -> list[float]:
    """Returns the point of least `loss` after some rounds of Nelder & Mead's method."""
    points = [list(begin)]
    points += [[x + size * (i == k) for i, x in enumerate(begin)] for k in range(len(begin))]
    corners = sorted((loss(point), point) for point in points)
    for _ in range(rounds):
        middle = [fmean(axis) for axis in zip(*(p for _, p in corners[:-1]), strict=True)]
        worst = corners[-1]

        def along(
            share: float, middle: list[float] = middle, worst: list[float] = worst[1]
        ) -> tuple[float, list[float]]:
            point = [m + share * (m - w) for m, w in zip(middle, worst, strict=True)]
            return loss(point), point

        best = along(1.0)
        if best < corners[0]:
            best = min(best, along(2.0))
        elif best >= corners[-2]:
            best = min(best, along(-0.5))
        if best < worst:
            corners[-1] = best
        else:
            least = corners[0][1]
            nearer = ([(x + y) / 2 for x, y in zip(p, least, strict=True)] for _, p in corners[1:])
            corners[1:] = [(loss(point), point) for point in nearer]
        corners.sort()
    return corners[0][1]
