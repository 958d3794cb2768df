"""Outer methods for `autopar.compile(..., outer=...)`: replicas that train apart, and synchronise.

    autopar.outer.co2(axis="node", tau="auto")

Every function returns an `Outer`, which also has a text: "co2 over node, tau=auto". Their rules are
in `autopar/runtime/outer/methods/`, one file each. A method of your own is used by its text.

Each takes the `axis` (or a tuple of axes) along which replicas are independent, `tau`, the steps of
a round ("auto", a number or a schedule, see `autopar.ir.tau`), and `on_loss`, "error" or "continue"
without a replica that is lost.
"""

from __future__ import annotations

from autopar.ir.outer import Outer as Outer

Axes = str | tuple[str, ...]
Steps = int | str


def local(axis: Axes, tau: Steps, on_loss: str = "error") -> Outer:
    """LocalSGD and Local-AdamW (Stich, arXiv:1805.09767): averages parameters every tau steps."""
    return Outer.of("local", axis, tau, on_loss)


def post_local(axis: Axes, tau: int, after: int, on_loss: str = "error") -> Outer:
    """Post-local SGD (Lin et al., arXiv:1808.07217): averages every step, from `after` every tau.

    With AdamW, averaging every step is not data parallelism, as moments stay the replicas' own.
    """
    return Outer.of("local", axis, f"1 until {after} then {tau}", on_loss)


def adaptive(axis: Axes, tau: int, by: str = "loss", on_loss: str = "error") -> Outer:
    """LocalSGD with fewer steps as the loss falls (`by="loss"`), or with more (`by="1/loss"`).

    See `autopar.ir.tau` for both rules and their sources.
    """
    return Outer.of("local", axis, f"{tau} by {by}", on_loss)


def slowmo(
    axis: Axes, tau: Steps, beta: float = 0.5, rate: float = 1.0, on_loss: str = "error"
) -> Outer:
    """SlowMo (Wang et al., arXiv:1910.00643): an outer momentum of the averages."""
    return Outer.of("slowmo", axis, tau, on_loss, beta=beta, rate=rate)


def overlap(
    axis: Axes, tau: Steps, alpha: float = 0.6, beta: float = 0.7, on_loss: str = "error"
) -> Outer:
    """Overlap-Local-SGD (Wang et al., arXiv:2002.09539): pulls replicas to a late average."""
    return Outer.of("overlap", axis, tau, on_loss, alpha=alpha, beta=beta)


def co2(
    axis: Axes,
    tau: Steps = "auto",
    beta: float = 0.2,
    rate: float = 1.0,
    penalty: float | str = "rate",
    clip: float | None = 1.0,
    on_loss: str = "error",
) -> Outer:
    """CO2 (Sun et al., arXiv:2401.16265): an outer momentum of averages that arrive a round late.

    Args:
        axis, tau, on_loss: as above.
        beta, rate: of the outer momentum.
        penalty: of the staleness gap: "rate" follows the learning rate, a number is constant, and
            "off" is 1.
        clip: bound of every element of the outer momentum; None for no bound.
    """
    return Outer.of(
        "co2", axis, tau, on_loss, beta=beta, rate=rate, penalty=penalty,
        clip="off" if clip is None else clip,
    )  # fmt: skip


def diloco(
    axis: Axes, tau: Steps, rate: float = 0.7, beta: float = 0.9, on_loss: str = "error"
) -> Outer:
    """DiLoCo (Douillard et al., arXiv:2311.08105): an outer SGD with Nesterov momentum."""
    return Outer.of("diloco", axis, tau, on_loss, rate=rate, beta=beta)


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
        axis, tau: as above; a lost replica is an error.
        fragments: into how many parts the parameters are cut, which synchronise one after another.
        delay: steps between a fragment's departure and its use.
        alpha: share of a replica's own parameters in what it goes on from.
        rate, beta: of the outer Nesterov momentum.
        message: "int8" sends differences as blocks of int8.
    """
    return Outer.of(
        "diloco", axis, tau, "error", rate=rate, beta=beta, fragments=fragments, delay=delay,
        alpha=alpha, message=message,
    )  # fmt: skip
