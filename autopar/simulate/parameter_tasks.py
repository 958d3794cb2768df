"""The parameters of a simulated step: gathering them, and synchronising their gradients.

The collectives are those of `Storage.hops`, which the program runs. Of a step with several
microbatches, the last one is simulated: the other microbatches' gradients have been accumulated
when it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.cost.operator_memory import reduction_staging
from autopar.cost.work import Work, accumulation_work
from autopar.ir.int8_blocks import staged
from autopar.ir.mesh import Mesh
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.storage import Hop, rows, scattered
from autopar.ir.tensor import Layout, TensorType
from autopar.simulate.buffers import Buffer, Recorder, Value
from autopar.simulate.message_copies import arriving, copy_in, copy_out
from autopar.simulate.parameter import Gather, Key, Used, Weight, one_call, path_key, titled
from autopar.simulate.task import Cause


@dataclass
class Weights:
    """The parameters of a step that have collectives.

    Attributes:
        mesh: the devices.
        recorder: records the tasks.
        overlap: see `Settings`.
        known: all of them, by node.
        direct: parameters that operators use in their stored layout, by the id of their value.
        microbatches: number in a step.
        bucket: bytes of gradients, or of parameters, in one call.
        precision: gives the dtypes of updates and of gradients in messages.
        together: whether sharded gradients are parts of one buffer, allocated with the first of
            them.
        rooms: parts of that buffer that are still free, by parameter; None before it is allocated.
        accelerator: see `Settings`.
        casts: whether gradients are cast before the update, rather than by its kernel.
        in_place, adds, ahead, copies: see `Settings`.
        plain: dtypes of parameters without collectives whose gradients accumulate, by the id of
            their value.
        waiting: gradients that wait for their bucket to fill, by time and collectives.
        again: parameters that are gathered again for the backward, by the id of their kept part.
        fetched, refetched: gathering for the forward, and again for the backward.
        left_out: residuals of the messages of this step.
    """

    mesh: Mesh
    recorder: Recorder
    overlap: frozenset[str]
    known: dict[str, Weight] = field(default_factory=dict)
    direct: dict[int, Weight] = field(default_factory=dict)
    again: dict[int, Weight] = field(default_factory=dict)
    microbatches: int = 1
    bucket: int = 1
    accelerator: bool = False
    casts: bool = True
    in_place: bool = False
    adds: bool = False
    ahead: bool = False
    copies: bool = False
    plain: dict[int, str] = field(default_factory=dict)
    precision: Precision = AS_IS
    together: bool = False
    rooms: dict[str, Buffer] | None = None
    waiting: dict[Key, list[tuple[Weight, Buffer, int]]] = field(default_factory=dict)
    left_out: list[Buffer] = field(default_factory=list)
    fetched: Gather = field(default_factory=lambda: Gather("forward"))
    refetched: Gather = field(default_factory=lambda: Gather("backward"))

    def add(self, weight: Weight) -> None:
        """Adds a parameter, with its accumulated gradient of earlier microbatches."""
        self.known[weight.name] = weight
        if not weight.storage.moves:
            self.direct[id(weight.value)] = weight
        if weight.path("forward"):
            self.fetched.add(weight.block, weight)
        if self.microbatches > 1:
            for hop in weight.path("accumulate"):  # by the microbatches before
                self._leave(weight, hop)
        if self.microbatches > 1 and weight.leaf.requires_grad:
            nbytes = self._bytes(weight, weight.storage.grads, self._own(weight))
            buffer = self.recorder.allocate("gradient", weight.name, nbytes)
            weight.total = self.recorder.hold(buffer)

    def use(self, weight: Weight) -> Value:
        """Returns a parameter as operators use it; the first use gathers its whole block."""
        source = weight.value
        if not weight.path("forward"):
            return Value(source.buffer, source.grad, ready=source.ready)
        if weight.name not in self.fetched.arrived:
            self._arrive(self.fetched, weight, -1 if self.recorder.phase == "backward" else 1)
        buffer, ready = self.fetched.take(weight)
        return Value(buffer, source.grad, ready=ready)

    def keep(self, weight: Weight, target: Value) -> None:
        """Saves the part of a gathered parameter that its storage keeps for the backward."""
        storage = weight.storage
        if not any(weight.path("backward")):
            return
        if storage.kept.dims == storage.held.dims:
            part = weight.value.buffer
        else:
            nbytes = self._bytes(weight, storage.kept)
            part = self.recorder.allocate("activation", f"part of {weight.name}", nbytes)
        target.buffer.kept, self.again[id(part)] = part, weight

    def save(self, kept: Buffer) -> None:
        """Records that an operator's backward needs a parameter of which only a part is kept."""
        weight = self.again[id(kept)]
        self.refetched.add(weight.block, weight)

    def fetch(self, saved: Iterable[Buffer]) -> list[tuple[Buffer, int]]:
        """Gathers again the parameters that an operator's backward needs whole.

        Returns:
            The new buffers, held, each with the task that produces it or -1.
        """
        gathered = []
        for weight in (self.again[id(part)] for part in saved if id(part) in self.again):
            if weight.name not in self.refetched.arrived:
                if weight.block in self.refetched.done:  # a second operator needs it
                    self.refetched.add(f"{weight.name} again", weight)
                    self._arrive(self.refetched, weight, 0, f"{weight.name} again")
                else:
                    self._arrive(self.refetched, weight, -1)
            buffer, ready = self.refetched.take(weight)
            gathered.append((self.recorder.hold(buffer), ready))
        return gathered

    def _arrive(self, gather: Gather, weight: Weight, step: int, block: str = "") -> None:
        """Waits for the parameters of a block, and starts to gather those of the next block."""
        block = block or weight.block
        gather.drop(self.recorder, but=block)
        if block not in gather.coming:
            self._depart(gather, block, False)
        gather.receive(block, self.recorder, self.copies)
        order = gather.order()
        place = order.index(block) + step if block in order else -1
        kind = "parameter" if gather is self.fetched else "refetch"
        ahead = kind in self.overlap and step and 0 <= place < len(order)
        if ahead and order[place] not in gather.coming:
            with self.recorder.aside():
                self._depart(gather, order[place], True)

    def _depart(self, gather: Gather, block: str, ahead: bool) -> None:
        gathered: dict[str, tuple[Buffer, int]] = {}
        for row in self._rows(gather, block):
            buffers = [weight.value.buffer for weight in row]
            ready = max(weight.value.ready for weight in row)
            for number, hops in enumerate(zip(*(w.path(gather.when) for w in row), strict=True)):
                call = one_call(hops)
                title = f"{call.title} of {titled('parameter', row)}"
                if ahead:
                    ready = self.recorder.launch(title, row[0].name, call, "parameter", [ready])
                else:
                    self.recorder.collective(title, row[0].name, call, "parameter")
                received = []
                for weight, hop, before in zip(row, hops, buffers, strict=True):
                    nbytes = self._bytes(weight, hop.dst)
                    new = self.recorder.allocate("temporary", weight.name, nbytes)
                    received.append(self.recorder.hold(new))
                    # Parts of rows, and several tensors of one call, go through a staging buffer.
                    joined = not self.in_place and (bool(hop.dim) or len(row) > 1)
                    staging = joined * nbytes + staged(hop.call, self.mesh)
                    self.recorder.scratch("communication", weight.name, staging)
                    if number:  # between two hops
                        self.recorder.drop(before)
                buffers = received
            gathered |= {w.name: (buffer, ready) for w, buffer in zip(row, buffers, strict=True)}
        gather.coming[block] = gathered

    def _rows(self, gather: Gather, block: str) -> list[list[Weight]]:
        """Returns the parameters of a block in groups that one collective gathers."""
        return rows(
            gather.members[block].values(),
            lambda weight: (weight.leaf.type.dtype, path_key(weight, gather.when)),
            lambda weight: self._bytes(weight, weight.storage.used),
            self.bucket,
        )

    def give(self, used: Used) -> None:
        """Takes over the gradient of a used parameter from the backward."""
        target, gradient = used.target, used.target.gradient
        used.weight.value.readers -= 1
        if gradient is not None:
            target.gradient = None
            self.take(used.weight, gradient, target.gradient_ready)

    def take(self, weight: Weight, gradient: Buffer, ready: int) -> None:
        """Sends the gradient of a parameter, given in its used layout."""
        if weight.path("accumulate"):
            gradient = self._cast(weight, gradient, weight.storage.used, self._sent(weight))
        self._send("accumulate", weight, gradient, ready)

    def arrived(self, value: Value) -> None:
        """Takes over the complete gradient of a parameter that is used as stored."""
        weight, gradient = self.direct.get(id(value)), value.gradient
        if weight is not None and gradient is not None:
            value.gradient = None
            self.take(weight, gradient, value.gradient_ready)
        elif gradient is not None and id(value) in self.plain:
            name, works = value.buffer.name, self._added(gradient, gradient, self.plain[id(value)])
            needs = [value.gradient_ready]
            self.recorder.compute(f"sum of gradients of {name}", name, works, needs)

    def _added(self, gradient: Buffer, total: Buffer, dtype: str) -> tuple[Work, ...]:
        """Returns the kernel that adds a gradient to those of earlier microbatches."""
        work = accumulation_work(gradient.nbytes, total.nbytes, dtype)
        return () if self.adds else (work,)

    def _own(self, weight: Weight) -> TensorType:
        return self.precision.updated(weight.leaf.type, weight.leaf.requires_grad)

    def _sent(self, weight: Weight) -> TensorType:
        return self.precision.sent(weight.leaf.type, weight.leaf.requires_grad)

    def _cast(self, weight: Weight, gradient: Buffer, layout: Layout, to: TensorType) -> Buffer:
        """Casts a gradient to another dtype, and drops the old one."""
        nbytes = self._bytes(weight, layout, to)
        if nbytes == gradient.nbytes:
            return gradient
        cast = self.recorder.hold(self.recorder.allocate("temporary", gradient.name, nbytes))
        self.recorder.drop(gradient)
        return cast

    def finish(self) -> None:
        """Sends the gradients that still wait at the end of the backward."""
        self.fetched.drop(self.recorder)
        self.refetched.drop(self.recorder)
        for when in ("accumulate", "reduce"):
            for key in [key for key in self.waiting if key[0] == when]:
                self._flush(key)

    def _leave(self, weight: Weight, hop: Hop) -> None:
        """Allocates the residual of a message; the residual of the previous step is still alive."""
        if hop.residual:
            left = f"{weight.name}, left out of a message"
            buffer = self.recorder.allocate("gradient", left, float(hop.residual))
            self.left_out.append(self.recorder.hold(buffer))

    def settle(self, chosen: bool) -> None:
        """Decides whether the step is made; only then one of the two is given up.

        Args:
            chosen: whether each is copied from one of the two.
        """
        if self.left_out:
            self.recorder.compute("whether the step is made", "", ())
            largest = max(left.nbytes for left in self.left_out)
            self.recorder.scratch("temporary", "one of the two", largest * chosen)
            for left in self.left_out:
                self.recorder.drop(left)
            self.left_out.clear()

    def _send(self, when: str, weight: Weight, gradient: Buffer, ready: int) -> None:
        path = path_key(weight, when)
        if not path:
            self._arrived(when, weight, gradient, ready)
            return
        key = (when, self._sent(weight).dtype, path)
        waiting = self.waiting.setdefault(key, [])
        waiting.append((weight, gradient, ready))
        if "gradient" not in self.overlap and {kind for kind, *_ in path} == {"all_reduce"}:
            return  # all of them go in one call at the end
        if sum(buffer.nbytes for _, buffer, _ in waiting) >= self.bucket:
            self._flush(key)

    def _flush(self, key: Key) -> None:
        """Runs the collectives of all waiting gradients with the same key."""
        recorder, together = self.recorder, self.waiting.pop(key)
        weights = [weight for weight, _, _ in together]
        buffers, ready = [buffer for _, buffer, _ in together], max(r for _, _, r in together)
        paths = list(zip(*(weight.path(key[0]) for weight in weights), strict=True))
        if self.copies:
            copy_in(recorder, weights, buffers, key[1], ready)
        for place, hops in enumerate(paths):
            call = one_call(hops)
            title = f"{call.title} of {titled('gradient', weights)}"
            cause: Cause = "accumulation" if key[0] == "accumulate" else "gradient"
            if "gradient" in self.overlap:
                needs = [ready, recorder.launched]
                ready = recorder.launch(title, weights[0].name, call, cause, needs)
                recorder.launched = ready  # one after another, on their own stream
            else:
                recorder.collective(title, weights[0].name, call, cause, [ready])
                ready = -1
            if self.in_place:
                for before in buffers:
                    recorder.drop(before)
                recorder.compute("gradients, reduced in place", "", ())
            for at, (weight, hop, before) in enumerate(zip(weights, hops, buffers, strict=True)):
                nbytes = self._bytes(weight, hop.dst, self._sent(weight))
                if key[0] == "reduce" or self.microbatches == 1:
                    self._leave(weight, hop)
                room = self._room(weight) if place == len(paths) - 1 else None
                buffers[at] = room or recorder.hold(
                    recorder.allocate("temporary", before.name, nbytes)
                )
                if self.in_place:
                    continue
                whole = self._bytes(weight, hop.src, self._sent(weight))
                staging = reduction_staging(
                    hop, whole, nbytes, self.mesh, self.accelerator, together=len(hops) > 1
                )
                recorder.scratch("communication", before.name, staging)
                recorder.drop(before)
        cast = any(self._sent(weight) != self._own(weight) for weight in weights)
        if cast and "gradient" not in self.overlap:
            recorder.compute("cast of gradients", "", ())  # messages have been freed
        for weight, buffer in zip(weights, buffers, strict=True):
            self._arrived(key[0], weight, buffer, ready)

    def _room(self, weight: Weight) -> Buffer | None:
        """Returns the gradient's part of the common buffer, if it has one and ends there."""

        def fits(other: Weight) -> bool:
            ends = self.microbatches == 1 or bool(other.path("reduce"))
            return scattered(other.hops) and ends and self._sent(other) == self._own(other)

        if not self.together or not fits(weight):
            return None
        if self.rooms is None:
            self.rooms = {}
            for other in filter(fits, self.known.values()):
                nbytes = self._bytes(other, other.storage.updated, self._own(other))
                part = self.recorder.allocate("gradient", other.name, nbytes)
                self.rooms[other.name] = self.recorder.hold(part)
        return self.rooms.pop(weight.name, None)

    def _arrived(self, when: str, weight: Weight, gradient: Buffer, ready: int) -> None:
        if when == "reduce":
            if self.casts:
                gradient = self._cast(weight, gradient, weight.storage.updated, self._own(weight))
            gradient.kind, gradient.name = "gradient", weight.value.buffer.name
            weight.value.gradient, weight.value.gradient_ready = gradient, ready
            return
        if weight.total is not None:
            works = self._added(gradient, weight.total, self._own(weight).dtype)
            self.recorder.compute(f"sum of gradients of {weight.name}", weight.name, works, [ready])
            self.recorder.drop(gradient)
            gradient, ready, weight.total = weight.total, -1, None
        if weight.path("reduce"):
            gradient = self._cast(weight, gradient, weight.storage.grads, self._sent(weight))
        self._send("reduce", weight, gradient, ready)

    def gather(self) -> None:
        """Gathers parameters after the update, from the devices that updated them.

        They wait for it, or a forward waits for each where it is used, if it is the next one's.
        """
        waiting: dict[object, list[Weight]] = {}
        for weight in self.known.values():
            path = path_key(weight, "update")
            if not path:
                continue
            same = waiting.setdefault((weight.leaf.type.dtype, path), [])
            same.append(weight)
            if sum(self._bytes(w, w.storage.updated) for w in same) >= self.bucket:
                self._gather_updated(same)
                same.clear()
        for same in waiting.values():
            if same:
                self._gather_updated(same)

    def _gather_updated(self, weights: Sequence[Weight]) -> None:
        paths = list(zip(*(weight.path("update") for weight in weights), strict=True))
        for place, hops in enumerate(paths):
            call = one_call(hops)
            title = f"{call.title} of {titled('parameter', weights)}"
            if self.ahead:
                needs = [weight.value.ready for weight in weights]
                ready = self.recorder.launch(title, weights[0].name, call, "update", needs)
                for weight in weights:
                    weight.value.ready = ready
            else:
                self.recorder.collective(title, weights[0].name, call, "update")
            ends = place == len(paths) - 1  # in the stored parameter
            for weight, hop in zip(weights, hops, strict=True):
                whole, part = self._bytes(weight, hop.dst), self._bytes(weight, hop.src)
                staging = arriving(hop, whole, part, len(hops) == 1, ends, self.mesh)
                # A master is cast, and the result of the previous hop is alive.
                cast = self._own(weight) != weight.leaf.type
                more = (cast or place > 0) * part + (0 if self.in_place else staging)
                self.recorder.scratch("communication", weight.name, more)
        if self.copies:
            held = [self._bytes(weight, weight.storage.held) for weight in weights]
            copy_out(self.recorder, weights, held)

    def _bytes(self, weight: Weight, layout: Layout, kind: TensorType | None = None) -> float:
        """Returns the local bytes of a parameter in a layout, by default in its own dtype."""
        return float(layout.local_bytes(kind or weight.leaf.type, self.mesh))
