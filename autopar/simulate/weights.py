"""Parameters of a simulated step: how they are gathered, and what becomes of their gradients.

The collectives are those of `Storage.hops`, which the program makes. Of a step of several
microbatches the last one is simulated: the sums of the others' gradients are there when it begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Hop, Storage
from autopar.ir.tensor import Layout
from autopar.simulate.memory import Buffer, Recorder, Value
from autopar.simulate.task import Cause


@dataclass(eq=False, slots=True)
class Weight:
    """A parameter that is exchanged.

    Attributes:
        name: the node.
        leaf: the node of the first block that stands for it.
        storage: where its states lie.
        value: what is held of it.
        hops: its collectives in a step.
        total: the sum of earlier gradients.
    """

    name: str
    leaf: Node
    storage: Storage
    value: Value
    hops: tuple[Hop, ...]
    total: Buffer | None = None


@dataclass(eq=False, slots=True)
class Used:
    """A use of a parameter on the tape."""

    weight: Weight
    target: Value


@dataclass
class Weights:
    """The parameters that a step exchanges.

    Attributes:
        mesh: the devices.
        recorder: what the step is written to.
        overlap: see `Settings`.
        known: by name of the node.
    """

    mesh: Mesh
    recorder: Recorder
    overlap: frozenset[str]
    known: dict[str, Weight] = field(default_factory=dict)

    def add(self, weight: Weight, microbatches: int) -> None:
        """One more; the sum of earlier gradients is there when the step begins."""
        self.known[weight.name] = weight
        if microbatches > 1 and weight.leaf.requires_grad:
            nbytes = self._bytes(weight, weight.storage.grads)
            buffer = self.recorder.allocate("gradient", weight.name, nbytes)
            weight.total = self.recorder.hold(buffer)

    def use(self, weight: Weight, behind: int, name: str) -> Value:
        """The parameter as operators use it.

        Args:
            weight: the parameter.
            behind: the task behind which it may be fetched ahead.
            name: what it is called.
        """
        source, recorder = weight.value, self.recorder
        target = Value(source.buffer, source.grad, ready=source.ready)
        for hop in _at(weight, "forward"):
            title = f"{hop.call.kind} of {name}"
            needs = [target.ready]
            if "parameter" in self.overlap:
                target.ready = recorder.launch(
                    title, weight.name, hop.call, "parameter", needs, behind
                )
            else:
                recorder.collective(title, weight.name, hop.call, "parameter", needs)
            nbytes, before = self._bytes(weight, hop.dst), target.buffer
            target.buffer = recorder.allocate("temporary", weight.name, nbytes)
            recorder.scratch("communication", weight.name, nbytes if hop.dim else 0.0)
            if before is not source.buffer:  # between two hops
                recorder.drop(recorder.hold(before))
        return target

    def give(self, used: Used) -> None:
        """What becomes of the gradient of a parameter, when the backward has made it."""
        weight, source, target = used.weight, used.weight.value, used.target
        source.readers -= 1
        gradient, ready = target.gradient, target.gradient_ready
        if gradient is None:
            return
        target.gradient = None
        gradient, ready = self._send(weight, "accumulate", gradient, ready)
        if weight.total is not None:
            self.recorder.compute(f"sum of gradients of {weight.name}", weight.name, (), [ready])
            self.recorder.drop(gradient)
            gradient, ready, weight.total = weight.total, -1, None
        gradient, ready = self._send(weight, "reduce", gradient, ready)
        gradient.kind, gradient.name = "gradient", source.buffer.name
        source.gradient, source.gradient_ready = gradient, ready

    def _send(self, weight: Weight, when: str, gradient: Buffer, ready: int) -> tuple[Buffer, int]:
        recorder = self.recorder
        for hop in _at(weight, when):
            title = f"{hop.call.kind} of gradient of {weight.name}"
            cause: Cause = "accumulation" if when == "accumulate" else "gradient"
            if "gradient" in self.overlap:
                needs = [ready, recorder.launched]
                ready = recorder.launch(title, weight.name, hop.call, cause, needs)
                recorder.launched = ready  # one after another, on a stream of their own
            else:
                recorder.collective(title, weight.name, hop.call, cause, [ready])
                ready = -1
            nbytes = self._bytes(weight, hop.dst)
            made = recorder.hold(recorder.allocate("temporary", gradient.name, nbytes))
            staging = self._bytes(weight, hop.src) if hop.dim else 0.0
            recorder.scratch("communication", gradient.name, staging)
            recorder.drop(gradient)
            gradient = made
        return gradient, ready

    def gather(self) -> None:
        """After the update: what other devices have updated."""
        for weight in self.known.values():
            for hop in _at(weight, "update"):
                title = f"{hop.call.kind} of {weight.name}"
                self.recorder.collective(title, weight.name, hop.call, "parameter")
                nbytes = self._bytes(weight, hop.dst)
                self.recorder.scratch("communication", weight.name, nbytes)
                # A part of a row is packed before it is sent.
                packed = self._bytes(weight, hop.src) + nbytes if hop.dim else 0.0
                self.recorder.scratch("communication", weight.name, packed)

    def _bytes(self, weight: Weight, layout: Layout) -> float:
        return float(layout.local_bytes(weight.leaf.type, self.mesh))


def _at(weight: Weight, when: str) -> Iterable[Hop]:
    return (hop for hop in weight.hops if hop.when == when)
