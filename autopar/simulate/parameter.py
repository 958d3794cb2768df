"""One parameter of a simulated step that is exchanged, and those that are gathered together."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.graph import Node
from autopar.ir.storage import Hop, Storage
from autopar.simulate.buffers import Buffer, Recorder, Value


@dataclass(eq=False, slots=True)
class Weight:
    """A parameter that is exchanged.

    Attributes:
        name: the node.
        leaf: the node of the first block that stands for it.
        storage: where its states lie.
        value: what is held of it.
        hops: its collectives in a step.
        block: those of one block are gathered together.
        place: where in the program it is first used.
        total: the sum of earlier gradients.
    """

    name: str
    leaf: Node
    storage: Storage
    value: Value
    hops: tuple[Hop, ...]
    block: str = ""
    place: int = 0
    total: Buffer | None = None

    def path(self, when: str) -> tuple[Hop, ...]:
        """Its collectives at one time of a step."""
        return tuple(hop for hop in self.hops if hop.when == when)


@dataclass(eq=False, slots=True)
class Used:
    """A use of a parameter on the tape."""

    weight: Weight
    target: Value


@dataclass(eq=False)
class Gather:
    """Parameters that are gathered at one time of a step.

    Attributes:
        when: see `Hop`.
        members: by block and name.
        arrived: buffers that nobody has taken, with the task that makes them or -1.
        coming: the same by block, of blocks that are on their way.
        done: blocks that have come.
    """

    when: str
    members: dict[str, dict[str, Weight]] = field(default_factory=dict)
    arrived: dict[str, tuple[Buffer, int]] = field(default_factory=dict)
    coming: dict[str, dict[str, tuple[Buffer, int]]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def order(self) -> list[str]:
        """The blocks in the order in which a forward uses them."""
        return sorted(self.members, key=lambda b: min(w.place for w in self.members[b].values()))

    def take(self, weight: Weight) -> tuple[Buffer, int]:
        """A parameter that has arrived, for its reader to hold."""
        buffer, ready = self.arrived.pop(weight.name)
        buffer.holders -= 1
        return buffer, ready

    def drop(self, recorder: Recorder, but: str = "") -> None:
        """Forget what nobody took, but for one block."""
        for name in [name for name in self.arrived if name not in self.members.get(but, {})]:
            recorder.drop(*self.arrived.pop(name))
