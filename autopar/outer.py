"""Outer methods for `autopar.compile(..., outer=...)`: replicas that synchronise rarely.

    autopar.outer.co2(axis="node", tau="auto")

Every function returns an `Outer`, which can also be written as text: "co2 over node, tau=auto". The
methods are implemented in `autopar/runtime/outer/methods/`, one file each. If you add a method,
select it by its text.

All functions take `axis`, the mesh axis (or a tuple of axes) along which replicas are independent,
and `tau`, the number of steps between synchronisations: "auto", a number or a schedule (see
`autopar.ir.replicas.tau`).
"""

from __future__ import annotations

from autopar.ir.replicas.outer_value import Outer as Outer

Axes = str | tuple[str, ...]
Steps = int | str


def local(axis: Axes, tau: Steps) -> Outer:
    """LocalSGD and Local-AdamW (Stich, arXiv:1805.09767): averages parameters every tau steps."""
    return Outer.of("local", axis, tau)


def post_local(axis: Axes, tau: int, after: int) -> Outer:
    """Post-local SGD (Lin et al., arXiv:1808.07217): averages every step, from `after` every tau.

    With AdamW, averaging every step is not data parallelism: each replica has its own moments.
    """
    return Outer.of("local", axis, f"1 until {after} then {tau}")


def adaptive(axis: Axes, tau: int, by: str = "loss") -> Outer:
    """LocalSGD with fewer steps as the loss falls (`by="loss"`), or with more (`by="1/loss"`).

    See `autopar.ir.replicas.tau` for both rules and their sources.
    """
    return Outer.of("local", axis, f"{tau} by {by}")


def slowmo(axis: Axes, tau: Steps, beta: float = 0.5, rate: float = 1.0) -> Outer:
    """SlowMo (Wang et al., arXiv:1910.00643): an outer momentum of the averages."""
    return Outer.of("slowmo", axis, tau, beta=beta, rate=rate)


def overlap(axis: Axes, tau: Steps, alpha: float = 0.6, beta: float = 0.7) -> Outer:
    """Overlap-Local-SGD (Wang et al., arXiv:2002.09539): pulls replicas to a late average."""
    return Outer.of("overlap", axis, tau, alpha=alpha, beta=beta)


def co2(
    axis: Axes,
    tau: Steps = "auto",
    beta: float = 0.2,
    rate: float = 1.0,
    penalty: float | str = "rate",
    clip: float | None = 1.0,
    origin: str = "anchor",
) -> Outer:
    """CO2 (Sun et al., arXiv:2401.16265): an outer momentum of averages that arrive a round late.

    Args:
        axis, tau: as above.
        beta, rate: momentum and learning rate of the outer optimizer.
        penalty: penalty of the staleness gap: "rate" follows the learning rate, a number is a
            constant, and "off" is 1.
        clip: bound of every element of the outer momentum; None for no bound.
        origin: the parameters with which a late average is compared: the current "anchor", or the
            anchor at the beginning of its "round", which needs one more copy in memory.
    """
    return Outer.of(
        "co2", axis, tau, beta=beta, rate=rate, penalty=penalty,
        clip="off" if clip is None else clip,
        origin=None if origin == "anchor" else origin,
    )  # fmt: skip


def diloco(axis: Axes, tau: Steps, rate: float = 0.7, beta: float = 0.9) -> Outer:
    """DiLoCo (Douillard et al., arXiv:2311.08105): an outer SGD with Nesterov momentum."""
    return Outer.of("diloco", axis, tau, rate=rate, beta=beta)


def streaming_diloco(
    axis: Axes,
    tau: Steps,
    fragments: int,
    delay: int = 0,
    alpha: float = 0.5,
    rate: float = 0.7,
    beta: float = 0.9,
    message: str | None = None,
) -> Outer:
    """Streaming DiLoCo (Douillard et al., arXiv:2501.18512).

    Args:
        axis, tau: as above.
        fragments: number of parts of the parameters, which synchronise one after another.
        delay: steps between a fragment's departure and its use.
        alpha: share of a replica's own parameters in the parameters from which it continues.
        rate, beta: learning rate and momentum of the outer Nesterov optimizer.
        message: "int8" sends differences as blocks of int8.
    """
    return Outer.of(
        "diloco", axis, tau, rate=rate, beta=beta, fragments=fragments, delay=delay,
        alpha=alpha, message=message,
    )  # fmt: skip
