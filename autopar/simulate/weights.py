"""Parameters of a simulated step: how they are gathered, and what becomes of their gradients.

The collectives are those of `Storage.hops`, which the program makes. Of a step of several
microbatches the last one is simulated: the sums of the others' gradients are there when it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.collective import Collective
from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Hop, Storage
from autopar.ir.tensor import Layout
from autopar.simulate.memory import Buffer, Recorder, Value
from autopar.simulate.task import Cause

Key = tuple[str, str, tuple[tuple[str, tuple[str, ...]], ...]]


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
        microbatches: in a step.
        bucket: bytes of gradients, or of parameters, that go together.
        accelerator: see `Settings`.
        waiting: gradients that do not go yet, by when and how.
        again: those that are gathered again for the backward, by the id of what is kept of them.
    """

    mesh: Mesh
    recorder: Recorder
    overlap: frozenset[str]
    known: dict[str, Weight] = field(default_factory=dict)
    again: dict[int, Weight] = field(default_factory=dict)
    microbatches: int = 1
    bucket: int = 1
    accelerator: bool = False
    waiting: dict[Key, list[tuple[Weight, Buffer, int]]] = field(default_factory=dict)

    def add(self, weight: Weight) -> None:
        """One more; the sum of earlier gradients is there when the step begins."""
        self.known[weight.name] = weight
        if self.microbatches > 1 and weight.leaf.requires_grad:
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

    def keep(self, weight: Weight, target: Value) -> None:
        """Keep of a parameter for the backward what its storage says."""
        storage = weight.storage
        if not any(_at(weight, "backward")):
            return
        if storage.kept.dims == storage.held.dims:
            part = weight.value.buffer
        else:
            nbytes = self._bytes(weight, storage.kept)
            part = self.recorder.allocate("activation", f"part of {weight.name}", nbytes)
        target.buffer.kept, self.again[id(part)] = part, weight

    def fetch(self, saved: Iterable[Buffer]) -> list[Buffer]:
        """Gather again what an operator's backward finds in parts; the new buffers, held."""
        found = []
        for weight in (self.again[id(part)] for part in saved if id(part) in self.again):
            for hop in _at(weight, "backward"):
                title = f"{hop.call.kind} of {weight.name} again"
                self.recorder.collective(title, weight.name, hop.call, "parameter")
                nbytes = self._bytes(weight, hop.dst)
                self.recorder.scratch("communication", weight.name, nbytes if hop.dim else 0.0)
                if hop.dst.dims != weight.storage.used.dims:
                    self.recorder.scratch("temporary", weight.name, nbytes)
            nbytes = self._bytes(weight, weight.storage.used)
            found.append(
                self.recorder.hold(self.recorder.allocate("temporary", weight.name, nbytes))
            )
        return found

    def give(self, used: Used) -> None:
        """What becomes of the gradient of a parameter, when the backward has made it."""
        weight, source, target = used.weight, used.weight.value, used.target
        source.readers -= 1
        gradient, ready = target.gradient, target.gradient_ready
        if gradient is None:
            return
        target.gradient = None
        self._send("accumulate", weight, gradient, ready)

    def finish(self) -> None:
        """Send what still waits when the backward has ended."""
        for when in ("accumulate", "reduce"):
            for key in [key for key in self.waiting if key[0] == when]:
                self._flush(key)

    def _send(self, when: str, weight: Weight, gradient: Buffer, ready: int) -> None:
        path = tuple((hop.call.kind, hop.call.axes) for hop in _at(weight, when))
        if not path:
            self._arrived(when, weight, gradient, ready)
            return
        key = (when, weight.leaf.type.dtype, path)
        waiting = self.waiting.setdefault(key, [])
        if path[0][0] == "all_reduce" and self.microbatches == 1:  # summed in place, in a copy
            made = self.recorder.allocate("temporary", gradient.name, gradient.nbytes)
            self.recorder.drop(gradient)
            gradient = self.recorder.hold(made)
        waiting.append((weight, gradient, ready))
        if "gradient" not in self.overlap and {kind for kind, _ in path} == {"all_reduce"}:
            return  # at the end, all as one
        if sum(buffer.nbytes for _, buffer, _ in waiting) >= self.bucket:
            self._flush(key)

    def _flush(self, key: Key) -> None:
        """One collective after the other for all gradients that go the same way."""
        recorder, together = self.recorder, self.waiting.pop(key)
        weights = [weight for weight, _, _ in together]
        buffers, ready = [buffer for _, buffer, _ in together], max(r for _, _, r in together)
        for hops in zip(*(_at(weight, key[0]) for weight in weights), strict=True):
            call = _one(hops)
            title = f"{call.kind} of {_titled('gradient', weights)}"
            cause: Cause = "accumulation" if key[0] == "accumulate" else "gradient"
            if "gradient" in self.overlap:
                needs = [ready, recorder.launched]
                ready = recorder.launch(title, weights[0].name, call, cause, needs)
                recorder.launched = ready  # one after another, on a stream of their own
            else:
                recorder.collective(title, weights[0].name, call, cause, [ready])
                ready = -1
            if call.kind == "all_reduce":
                continue
            for at, (weight, hop, before) in enumerate(zip(weights, hops, buffers, strict=True)):
                nbytes = self._bytes(weight, hop.dst)
                buffers[at] = recorder.hold(recorder.allocate("temporary", before.name, nbytes))
                # Blocks of a row are put side by side, and several tensors into one buffer; gloo
                # sums in a copy of that.
                copies = bool(hop.dim) + (len(hops) > 1) + (not self.accelerator)
                staging = copies * self._bytes(weight, hop.src)
                recorder.scratch("communication", before.name, staging)
                recorder.drop(before)
        for weight, buffer in zip(weights, buffers, strict=True):
            self._arrived(key[0], weight, buffer, ready)

    def _arrived(self, when: str, weight: Weight, gradient: Buffer, ready: int) -> None:
        if when == "reduce":
            gradient.kind, gradient.name = "gradient", weight.value.buffer.name
            weight.value.gradient, weight.value.gradient_ready = gradient, ready
            return
        if weight.total is not None:
            self.recorder.compute(f"sum of gradients of {weight.name}", weight.name, (), [ready])
            self.recorder.drop(gradient)
            gradient, ready, weight.total = weight.total, -1, None
        self._send("reduce", weight, gradient, ready)

    def gather(self) -> None:
        """After the update: what other devices have updated."""
        waiting: dict[object, list[Weight]] = {}
        for weight in self.known.values():
            path = tuple((hop.call.kind, hop.call.axes) for hop in _at(weight, "update"))
            if not path:
                continue
            same = waiting.setdefault((weight.leaf.type.dtype, path), [])
            same.append(weight)
            if sum(self._bytes(w, w.storage.updated) for w in same) >= self.bucket:
                self._put_together(same)
                same.clear()
        for same in waiting.values():
            if same:
                self._put_together(same)

    def _put_together(self, weights: Sequence[Weight]) -> None:
        for place, hops in enumerate(zip(*(_at(w, "update") for w in weights), strict=True)):
            call = _one(hops)
            title = f"{call.kind} of {_titled('parameter', weights)}"
            self.recorder.collective(title, weights[0].name, call, "parameter")
            for weight, hop in zip(weights, hops, strict=True):
                nbytes = self._bytes(weight, hop.dst)
                # What is sent is packed where it is a part of a row or not alone; what came is
                # joined.
                packed = bool(hop.dim) or len(hops) > 1
                more = packed * (self._bytes(weight, hop.src) + nbytes)
                more += (place > 0) * self._bytes(weight, hop.src)  # what came by the hop before
                self.recorder.scratch("communication", weight.name, nbytes + more)

    def _bytes(self, weight: Weight, layout: Layout) -> float:
        return float(layout.local_bytes(weight.leaf.type, self.mesh))


def _one(hops: Sequence[Hop]) -> Collective:
    """The collective that does for several tensors what each hop does for one."""
    return replace(hops[0].call, nbytes=sum(hop.call.nbytes for hop in hops))


def _titled(what: str, weights: Sequence[Weight]) -> str:
    return f"{what} of {weights[0].name}" if len(weights) == 1 else f"{len(weights)} {what}s"


def _at(weight: Weight, when: str) -> Iterable[Hop]:
    return (hop for hop in weight.hops if hop.when == when)
