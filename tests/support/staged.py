"""A backend for several processes that share one GPU, where NCCL refuses a second one.

Every call copies its CUDA tensors to the host, runs gloo there, and copies the results back on a
stream of its own once somebody waits for the call. As under NCCL, a result that nobody awaits stays
unwritten, and `wait` orders streams only. Without a GPU all tensors take the same way, so that the
backend itself is tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "staged"


class StagedWork(dist._Work):
    """A call of gloo, and the copies of its results.

    Args:
        work: gloo's.
        results: pairs of a tensor and the host's copy that is to be written to it.
    """

    def __init__(self, work: Any, results: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self._work, self._results = work, list(results)

    def is_completed(self) -> bool:
        """Returns whether the host has the results."""
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Writes the results, before whatever the current stream runs next."""
        self._work.wait()
        for tensor, host in self._results:
            if tensor.is_cuda:
                stream = _stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    tensor.copy_(host)
                torch.cuda.current_stream().wait_stream(stream)
            else:
                tensor.copy_(host)
        self._results = []
        return True


_STREAMS: list[torch.cuda.Stream] = []


def _stream() -> torch.cuda.Stream:
    """Returns the stream of copies of this process."""
    if not _STREAMS:
        _STREAMS.append(torch.cuda.Stream())
    return _STREAMS[0]


def _host(tensor: Tensor) -> Tensor:
    """Returns a copy on the host."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class StagedGroup(dist.ProcessGroup):
    """A process group whose tensors travel through the host; see the module."""

    def __init__(self, gloo: Any) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo, self._name = gloo, ""

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return BACKEND

    def _in_place(self, call: Callable[..., Any], tensors: list[Tensor], *args: Any) -> StagedWork:
        hosts = [_host(tensor) for tensor in tensors]
        return StagedWork(call(hosts, *args), zip(tensors, hosts, strict=True))

    def _single(self, names: Sequence[str], out: Tensor, x: Tensor, *args: Any) -> StagedWork:
        call = next(getattr(self._gloo, name) for name in names if hasattr(self._gloo, name))
        host = _host(out)
        return StagedWork(call(host, _host(x), *args), [(out, host)])

    def allreduce(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        return self._in_place(self._gloo.allreduce, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        return self._in_place(self._gloo.broadcast, tensors, opts)

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any) -> StagedWork:
        hosts = [[_host(out) for out in group] for group in outs]
        work = self._gloo.allgather(hosts, [_host(x) for x in xs], opts)
        return StagedWork(work, zip(chain(*outs), chain(*hosts), strict=True))

    def gather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any) -> StagedWork:
        hosts = [[_host(out) for out in group] for group in outs]
        work = self._gloo.gather(hosts, [_host(x) for x in xs], opts)
        return StagedWork(work, zip(chain(*outs), chain(*hosts), strict=True))

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any) -> StagedWork:
        return self._single(("all_gather_single", "_allgather_base"), out, x, opts)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> StagedWork:
        return self._single(("reduce_scatter_single", "_reduce_scatter_base"), out, x, opts)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, takes: list[int], sends: list[int], opts: Any
    ) -> StagedWork:
        return self._single(("all_to_all_single", "alltoall_base"), out, x, takes, sends, opts)

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any) -> StagedWork:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        opts.device = torch.device("cpu")
        return StagedWork(self._gloo.barrier(opts))

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> StagedWork:
        return StagedWork(self._gloo.send([_host(x) for x in tensors], receiver, tag))

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> StagedWork:
        return self._in_place(self._gloo.recv, tensors, sender, tag)


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(dist.ProcessGroupGloo(store, rank, size, timeout))


def register() -> None:
    """Lets `init_process_group` make such groups, once a process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _made, devices=["cpu", "cuda"])
