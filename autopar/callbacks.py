"""Callbacks of a session: progress in the terminal, TensorBoard and Weights & Biases.

session.add_callback(autopar.callbacks.Progress(total=1000))

A callback is any object with `on_step(metrics)` and `close()`; see
`autopar.session.step_metrics.StepMetrics` for the figures. To log once, add it on one rank:

    if dist.get_rank() == 0:
        session.add_callback(autopar.callbacks.TensorBoard("runs/1"))
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from autopar.errors import MissingDependencyError
from autopar.ir.units import format_bytes, format_seconds
from autopar.session.step_metrics import StepMetrics


class Progress:
    """A line in the terminal: steps, loss, tokens per second, utilisation, memory, remaining time.

    Args:
        total: number of steps; None if unknown.
        console: where to write, by default the terminal's standard error.
    """

    def __init__(self, total: int | None = None, console: Console | None = None) -> None:
        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def on_step(self, metrics: StepMetrics) -> None:
        """Shows a step."""
        exposed = metrics.exposed_seconds
        parts = [
            f"loss {metrics.loss:.4f}",
            format_seconds(metrics.seconds),
            f"{metrics.tokens_per_second:,.0f} tokens/s",
            f"MFU {metrics.utilisation:.1%}",
            format_bytes(metrics.memory),
            *([f"{exposed / metrics.seconds:.0%} waiting"] if exposed is not None else []),
        ]
        self._bar.update(self._task, advance=1, description="  ".join(parts))

    def close(self) -> None:
        """Leaves the last line in the terminal."""
        self._bar.stop()


class TensorBoard:
    """Scalars for TensorBoard.

    Args:
        folder: folder of the event files.
        prefix: prefix of the names of the figures.

    Raises:
        MissingDependencyError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | Path, prefix: str = "train/") -> None:
        _module("tensorboard", "event files are written by it")
        writer = _module("torch.utils.tensorboard", "event files are written by it")
        self._writer, self._prefix = writer.SummaryWriter(str(folder)), prefix

    def on_step(self, metrics: StepMetrics) -> None:
        """Writes the figures of a step."""
        for name, value in metrics.figures.items():
            self._writer.add_scalar(f"{self._prefix}{name}", value, metrics.step)

    def close(self) -> None:
        """Writes all pending events."""
        self._writer.close()


class WandB:
    """Figures for a run of Weights & Biases.

    Args:
        prefix: prefix of the names of the figures.
        **options: options of `wandb.init`.

    Raises:
        MissingDependencyError: the package wandb is not installed.
    """

    def __init__(self, prefix: str = "train/", **options: Any) -> None:
        wandb = _module("wandb", "runs are logged by it")
        self._run, self._prefix = wandb.init(**options), prefix

    def on_step(self, metrics: StepMetrics) -> None:
        """Logs the figures of a step."""
        named = {f"{self._prefix}{name}": value for name, value in metrics.figures.items()}
        self._run.log(named, step=metrics.step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _module(name: str, why: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingDependencyError(
            f"{package} is not installed", why=why, todo=f"pip install {package}"
        ) from error


__all__ = ["Progress", "TensorBoard", "WandB"]
