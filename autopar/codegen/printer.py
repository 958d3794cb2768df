"""The graph, plan and prices that all functions of a generated program print."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.collective import GATHERS, Collective, Step
from autopar.ir.graph import Name, Node
from autopar.ir.storage import EACH, Hop, Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.ir.units import format_bytes, format_seconds
from autopar.lower.lines import Compute
from autopar.lower.literals import names_text
from autopar.lower.planned_layouts import Placed
from autopar.operators.exchange import exchanged


@dataclass(frozen=True)
class Printer(Placed):
    """A graph with the layouts of a plan, and prices as comments."""

    def extent(self, size: int, axes: tuple[str, ...]) -> int | Name:
        """Returns a dimension's local size: a number, or code if it differs between devices."""
        layout = Layout((axes,))
        if layout.is_even((size,), self.plan.mesh):
            return layout.local_shape((size,), self.plan.mesh)[0]
        return Name(f"mesh.part({size}, {names_text(axes)})")

    def gathered(self, step: Step, tensor: TensorType) -> str:
        """Returns the `size` argument of a step that gathers unequal parts, else ""."""
        if step.op not in GATHERS or step.dim is None:
            return ""
        size, axes = tensor.shape[step.dim], step.src.dims[step.dim]
        if Layout((axes,)).is_even((size,), self.plan.mesh):
            return ""
        return f", size={self.extent(size, step.dst.dims[step.dim])}"

    def step_note(self, step: Step, tensor: TensorType) -> str:
        """Returns the layout after a step, and its bytes and seconds in each direction."""
        note = f"{tensor.dtype}{step.dst.format(tensor.shape)}"
        if step.forward is not None:
            note += f"  {self._call_note(step.forward)}"
        if step.backward is not None:
            note += f"  backward {step.backward.kind} {self._call_note(step.backward)}"
        return note

    def hops(self, leaf: Node, storage: Storage) -> tuple[Hop, ...]:
        """Returns the collectives of a parameter in a step."""
        return self.plan.hops(leaf, storage)

    def use(self, leaf: Node, storage: Storage) -> str:
        """Returns the call that brings a stored parameter, "{}", into its used layout."""
        dims = enumerate(zip(storage.held.dims, storage.used.dims, strict=True))
        split = [(dim, more[len(less) :]) for dim, (more, less) in dims if more != less]
        if not split:
            return f"to_varying({{}}, axis={names_text(storage.used.varying)})"
        (dim, axes), *_ = split
        size, (held, used) = leaf.type.shape[dim], (storage.held.dims[dim], storage.used.dims[dim])
        even = Layout((held,)).is_even((size,), self.plan.mesh)
        whole = "" if even else f", size={self.extent(size, used)}"
        return f"all_gather({{}}, dim={dim}, axis={names_text(axes)}{whole})"

    def use_note(self, leaf: Node, storage: Storage) -> str:
        """Returns the layout in which operators use a parameter."""
        return f"{leaf.type.dtype}{storage.used.format(leaf.type.shape)}"

    def sent_note(self, leaf: Node, storage: Storage) -> str:
        """Returns the collectives of a parameter and its gradient in a step, with their prices."""
        note = ""
        for hop in self.hops(leaf, storage):
            seconds = hop.seconds(self.price, self.plan.bucket)
            size = f"{format_bytes(hop.call.nbytes)} {format_seconds(seconds)}"
            call = f"{hop.call.title} {size}"
            if hop.when == "forward":
                note += f"  {hop.call.compression + ' ' if hop.call.compression else ''}{size}"
            elif hop.when in EACH or (hop.when == "reduce" and self.plan.microbatches == 1):
                note += f"  backward {call}"
            else:
                note += f"  once {call}"
        return note

    def exchange_note(self, line: Compute) -> str:
        """Returns the collectives inside an operator in each direction, "" for most operators."""
        types = tuple(self.graph[name].type for name in line.node.inputs)
        forward, backward = exchanged(line.node, types, line.into, self.plan.mesh, line.form)
        notes = [f"{call.kind} {self._call_note(call)}" for call in forward]
        notes += [f"backward {call.kind} {self._call_note(call)}" for call in backward]
        return "".join(f"  {note}" for note in notes)

    def _call_note(self, call: Collective) -> str:
        return f"{format_bytes(call.nbytes)} {format_seconds(self.price(call))}"
