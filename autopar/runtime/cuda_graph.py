"""A step as one CUDA graph: forward, backward and update are launched at once, with no Python.

The first steps run as they are, on a stream of their own, so that everything is allocated and
compiled that is once. The next one is captured, and from then on replayed on inputs that are copied
to where it reads them (CUDA C++ Programming Guide, "CUDA Graphs"; torch.cuda.CUDAGraph).

Only what waits for nothing on the host can be captured; `refuse` says what cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import ProgramError

WARM = 3  # steps before the capture
Inputs = Mapping[str, Tensor]
# The loss, and the norm of the gradients where it is wanted.
Results = tuple[Tensor, Tensor | None]


def refuse(device: torch.device, *, random: bool, offloaded: bool, counted: bool) -> None:
    """ProgramError if a step cannot be captured.

    Args:
        device: where it runs.
        random: whether it draws random numbers.
        offloaded: whether something lies in host memory.
        counted: whether the optimizer counts its steps on the device, and reads its options there.
    """
    why, todo = "", "leave cuda_graph out"
    if device.type != "cuda":
        why = f"it runs on a device of type {device.type}, and graphs are CUDA's"
    elif dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "nccl":
        why = f"collectives of {dist.get_backend()} run on the host"
    elif random:
        why = "its random numbers are seeded on the host in every step"
    elif offloaded:
        why, todo = "the host waits for copies to and from its memory", "leave offload out"
    elif not counted:
        why = "the optimizer counts its steps on the host"
        todo = 'train with torch.optim.AdamW and fuse=["adamw"], or ' + todo
    if why:
        raise ProgramError("the step cannot be a CUDA graph", why=why, todo=todo)


class CudaGraph:
    """Makes steps, from some step on by replaying one.

    Args:
        step: what is captured: a step on inputs that are on the device.
        refresh: what the host does before every replay.
        cuda: `torch.cuda`, or what stands for it in a test.
    """

    def __init__(
        self, step: Callable[[Inputs], Results], refresh: Callable[[], None], cuda: Any = torch.cuda
    ) -> None:
        self._step, self._refresh, self._cuda = step, refresh, cuda
        self._stream = cuda.Stream()
        self.reset()

    def reset(self) -> None:
        """Capture anew: tensors that a step reads are others now."""
        self._warm, self._graph = 0, None
        self._inputs: dict[str, Tensor] = {}
        self._results: Results | None = None

    def __call__(self, inputs: Inputs) -> Results:
        """One step; what it returns is the caller's.

        Raises:
            ProgramError: something in the step cannot be captured.
        """
        if self._warm < WARM:
            self._warm += 1
            return self._beside(inputs)
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

    def _beside(self, inputs: Inputs) -> Results:
        """A step as it is, on the stream on which one is captured."""
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            results = self._step(inputs)
        self._cuda.current_stream().wait_stream(self._stream)
        return results

    def _capture(self, inputs: Inputs) -> None:
        """Take down a step without making it."""
        held = {name: tensor.clone() for name, tensor in inputs.items()}
        graph = self._cuda.CUDAGraph()
        try:
            # Other threads, as the one that watches NCCL, may go on calling CUDA.
            with self._cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                results = self._step(held)
        except RuntimeError as error:
            raise ProgramError(
                "the step cannot be a CUDA graph",
                why=str(error).strip().partition("\n")[0],
                todo="leave cuda_graph out",
            ) from error
        self._graph, self._inputs, self._results = graph, held, results
