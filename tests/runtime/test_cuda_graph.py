"""Capturing and replaying a step, on fake graphs that record what was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ProgramError
from autopar.runtime.cuda_graph import WARM, CudaGraph, Results, refuse
from tests.support.mixed import net

CUDA = torch.device("cuda")
FITS = {"random": False, "offloaded": False, "counted": True}


class Graph:
    """Replays what wrote into it."""

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None


class Fake:
    """In the place of `torch.cuda`: work inside of a graph is noted and not done."""

    CUDAGraph = Graph

    def __init__(self) -> None:
        self.capturing: Graph | None = None
        self.captures = 0
        self.waits: list[str] = []

    def Stream(self) -> Any:
        return self

    def wait_stream(self, other: Any) -> None:
        assert self.capturing is None

    def current_stream(self) -> Any:
        return self

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: Graph, **how: Any) -> Iterator[None]:
        self.capturing, self.captures = graph, self.captures + 1
        yield
        self.capturing = None


class Training:
    """weight -= rate x; the loss is weight x, of the weight before. Rates are the host's."""

    def __init__(self, cuda: Fake) -> None:
        self.cuda, self.weight = cuda, torch.zeros(())
        self.rate, self.given = 0.5, torch.zeros(())
        self.loss, self.norm = torch.zeros(()), torch.zeros(())

    def refresh(self) -> None:
        self.given.fill_(self.rate)

    def step(self, inputs: Any) -> Results:
        def work() -> None:
            self.loss.copy_(self.weight * inputs["x"])
            self.norm.copy_(inputs["x"].abs())
            self.weight -= self.given * inputs["x"]

        if self.cuda.capturing is None:
            self.refresh()
            work()
        else:
            self.cuda.capturing.replay = work
        return self.loss, self.norm


def losses(step: Callable[[Any], Results], training: Training) -> list[Tensor]:
    found: list[Tensor] = []
    for number in range(2 * WARM):
        training.rate = 0.5 / (number + 1)
        given = torch.tensor(float(number + 1))
        loss, norm = step({"x": given})
        assert norm is not None
        assert norm == given
        given.fill_(torch.nan)  # the batch is the caller's again
        found.append(loss if number >= WARM else loss.clone())
    return found


def test_replays_read_new_inputs_and_options_and_give_results_of_their_own() -> None:
    cuda = Fake()
    training, plain = Training(cuda), Training(Fake())
    graphed = CudaGraph(training.step, training.refresh, cuda)
    found = losses(graphed, training)
    assert cuda.captures == 1
    kept = [loss.clone() for loss in losses(lambda x: plain.step(x), plain)]
    assert torch.equal(training.weight, plain.weight)
    assert found[:WARM] == kept[:WARM]
    assert len({loss.data_ptr() for loss in found[WARM:]}) == WARM


def test_a_program_whose_tensors_are_others_is_captured_again() -> None:
    cuda = Fake()
    training = Training(cuda)
    graphed = CudaGraph(training.step, training.refresh, cuda)
    losses(graphed, training)
    graphed.reset()
    losses(graphed, training)
    assert cuda.captures == 2


def test_what_cannot_be_captured_is_said_by_name() -> None:
    class Broken(Fake):
        @contextmanager
        def graph(self, graph: Graph, **how: Any) -> Iterator[None]:
            raise RuntimeError("operation not permitted when stream is capturing\nat kernel.cu")
            yield

    cuda = Broken()
    training = Training(cuda)
    with pytest.raises(ProgramError, match="operation not permitted") as raised:
        losses(CudaGraph(training.step, training.refresh, cuda), training)
    assert "kernel.cu" not in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"random": True}, "random numbers"),
        ({"offloaded": True}, "copies"),
        ({"counted": False}, "counts its steps"),
    ],
)
def test_steps_that_the_host_takes_part_in_are_refused(wrong: dict[str, bool], why: str) -> None:
    refuse(CUDA, **FITS)
    with pytest.raises(ProgramError, match=why):
        refuse(CUDA, **{**FITS, **wrong})


def test_programs_on_cpus_and_pipelines_are_refused() -> None:
    model, batch = net()
    step = partial(autopar.compile, model, example_inputs=batch, cuda_graph=True)
    with pytest.raises(ProgramError, match="a device of type cpu"):
        step("cpu: gpu=1", fuse=["adamw"])
    with pytest.raises(ProgramError, match="a device of type cpu"):
        step("cpu: gpu=1", fuse=["adamw"], microbatches=2)
    with pytest.raises(ProgramError, match="schedule of a pipeline"):
        step("cpu: gpu=1", stages=2, microbatches=2)


@pytest.mark.parametrize("parts", [{}, {"microbatches": 2}], ids=["one piece", "microbatches"])
def test_the_part_of_a_step_that_is_captured_is_the_step(parts: dict[str, int]) -> None:
    """An executor's step through a graph that is none is its step as it is."""
    model, batch = net()
    how = {"fuse": ["adamw"], "clip_norm": 0.5, "example_inputs": batch, **parts}
    one, other = (autopar.compile(model, "cpu: gpu=1", **how) for _ in range(2))
    executor = other._executor
    if parts:
        run, holder = partial(executor._flushed, executor.main, executor.row), executor
    else:
        run, holder = partial(executor._step, executor.main), executor.main

    class Once(Graph):
        def __init__(self) -> None:
            def replay() -> None:
                loss, norm = run(graph._inputs)
                graph._results[0].copy_(loss)
                graph._results[1].copy_(norm)

            self.replay = replay

    class Captures(Fake):
        CUDAGraph = Once

    def step(inputs: Any) -> Results:
        if cuda.capturing is None:
            return run(inputs)
        return torch.zeros(()), torch.zeros((), dtype=torch.float64)

    cuda = Captures()
    graph = holder.graph = CudaGraph(step, executor.update.kernel.refresh, cuda)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(p.optimizer, 0.9) for p in (one, other)]
    for _ in range(2 * WARM):
        assert one.step(**batch) == other.step(**batch)
        assert one.grad_norm == other.grad_norm
        for schedule in schedules:
            schedule.step()
    assert cuda.captures == 1
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    other.load_state_dict(nn.Module.state_dict(model))
    other.step(**batch)
    assert cuda.captures == 1  # it warms up again first
