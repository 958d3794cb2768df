"""Runs a step as one CUDA graph, which launches forward, backward and update without Python.

The first steps run eagerly on a stream of their own, which allocates and compiles everything that
is needed once. The next step is captured, and later steps copy their inputs to where the graph
reads them and replay it (CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.CUDAGraph).

A step that waits for the host cannot be captured; `refuse` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import ProgramError
from autopar.runtime.ranks.shared import backend

WARM = 3  # eager steps before the capture
Inputs = Mapping[str, Tensor]
# The loss, and the norm of the gradients if it is needed.
Results = tuple[Tensor, Tensor | None]


def refuse(device: torch.device, *, random: bool, offloaded: bool, counted: bool) -> None:
    """Raises ProgramError if a step cannot be captured.

    Args:
        device: the device of the program.
        random: whether it draws random numbers.
        offloaded: whether it offloads anything to host memory.
        counted: whether the optimizer counts its steps, and reads its options, on the device.
    """
    why, todo = "", "omit cuda_graph"
    if device.type != "cuda":
        why = f"it runs on a device of type {device.type}, which has no CUDA graphs"
    elif dist.is_initialized() and dist.get_world_size() > 1 and backend() != "nccl":
        why = f"collectives of {backend()} run on the host"
    elif random:
        why = "its random numbers are seeded on the host in every step"
    elif offloaded:
        why, todo = "the host waits for copies to and from its memory", "omit offload"
    elif not counted:
        why = "the optimizer counts its steps on the host"
        todo = 'train with torch.optim.AdamW and fuse=["adamw"], or ' + todo
    if why:
        raise ProgramError("the step cannot be a CUDA graph", why=why, todo=todo)


class CudaGraph:
    """Runs steps eagerly at first, and later by replaying a captured one.

    Args:
        step: the step to capture, a function of inputs on the device.
        refresh: the host's work before every replay.
        cuda: `torch.cuda`, or its replacement in a test.
    """

    def __init__(
        self, step: Callable[[Inputs], Results], refresh: Callable[[], None], cuda: Any = torch.cuda
    ) -> None:
        self._step, self._refresh, self._cuda = step, refresh, cuda
        self._stream = cuda.Stream()
        self.reset()

    def reset(self) -> None:
        """Captures again, because a step's tensors have been replaced."""
        self._warm, self._graph = 0, None
        self._inputs: dict[str, Tensor] = {}
        self._results: Results | None = None

    def __call__(self, inputs: Inputs) -> Results:
        """Runs one step; the caller owns the results.

        Raises:
            ProgramError: part of the step cannot be captured.
        """
        if self._warm < WARM:
            self._warm += 1
            return self._eager(inputs)
        if self._graph is None:
            self._capture(inputs)
        for name, held in self._inputs.items():
            held.copy_(inputs[name])
        self._refresh()
        assert self._graph is not None
        assert self._results is not None
        self._graph.replay()
        loss, norm = self._results
        return loss.clone(), None if norm is None else norm.clone()

    def _eager(self, inputs: Inputs) -> Results:
        """Runs an eager step on the stream that captures."""
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            results = self._step(inputs)
        self._cuda.current_stream().wait_stream(self._stream)
        return results

    def _capture(self, inputs: Inputs) -> None:
        """Captures a step without running it."""
        held = {name: tensor.clone() for name, tensor in inputs.items()}
        graph = self._cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's watchdog, may go on calling CUDA.
            with self._cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                results = self._step(held)
        except RuntimeError as error:
            raise ProgramError(
                "the step cannot be a CUDA graph",
                why=str(error).strip().partition("\n")[0],
                todo="omit cuda_graph",
            ) from error
        self._graph, self._inputs, self._results = graph, held, results
