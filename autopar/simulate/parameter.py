"""Parameters with collectives in a simulated step, and their gathering block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.work import copy_work
from autopar.ir.collective import Collective
from autopar.ir.graph import Node
from autopar.ir.storage import Hop, Storage
from autopar.simulate.buffers import Buffer, Recorder, Value

Path = tuple[tuple[str, tuple[str, ...], str], ...]
Key = tuple[str, str, Path]


@dataclass(eq=False, slots=True)
class Weight:
    """A parameter with collectives.

    Attributes:
        name: the node.
        leaf: the node of the first block that represents it.
        storage: the layouts of its states.
        value: its stored shard.
        hops: its collectives in a step.
        paths: the same by the time of a step, see `paths_of`.
        block: its block, whose parameters are gathered together.
        place: index of its first use in the program.
        total: the sum of earlier microbatches' gradients.
    """

    name: str
    leaf: Node
    storage: Storage
    value: Value
    hops: tuple[Hop, ...]
    paths: Mapping[str, tuple[Hop, ...]]
    block: str = ""
    place: int = 0
    total: Buffer | None = None

    def path(self, when: str) -> tuple[Hop, ...]:
        """Returns its collectives at one time of a step; see `Hop.when`."""
        return self.paths.get(when, ())


@dataclass(eq=False, slots=True)
class Used:
    """The use of a parameter on the tape."""

    weight: Weight
    target: Value


@dataclass(eq=False)
class Gather:
    """The parameters that are gathered for the forward, or again for the backward.

    Attributes:
        when: see `Hop`.
        members: by block and name.
        places: of each block, the index of its first use in the program.
        arrived: gathered buffers that no reader has taken yet, with the task that produces them or
            -1.
        coming: the same by block, for blocks that are being gathered.
        done: blocks that have been gathered.
    """

    when: str
    members: dict[str, dict[str, Weight]] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    arrived: dict[str, tuple[Buffer, int]] = field(default_factory=dict)
    coming: dict[str, dict[str, tuple[Buffer, int]]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def add(self, block: str, weight: Weight) -> None:
        """Adds a parameter to a block."""
        self.members.setdefault(block, {})[weight.name] = weight
        self.places[block] = min(self.places.get(block, weight.place), weight.place)

    def order(self) -> list[str]:
        """Returns the blocks in the order in which a forward uses them."""
        return sorted(self.places, key=self.places.__getitem__)

    def take(self, weight: Weight) -> tuple[Buffer, int]:
        """Returns a gathered parameter, for its reader to hold."""
        buffer, ready = self.arrived.pop(weight.name)
        buffer.holders -= 1
        return buffer, ready

    def receive(self, block: str, recorder: Recorder, copies: bool) -> None:
        """Waits for the parameters of a block; `copies` takes them out of their messages."""
        self.done.add(block)
        for name, (buffer, ready) in self.coming.pop(block).items():
            self.arrived[name] = (buffer, ready)
            if copies:
                leaf = self.members[block][name].leaf
                works = (copy_work(buffer.nbytes, buffer.nbytes, leaf.type.dtype),)
                recorder.compute(f"copy of {name} out of a message", name, works, [ready])

    def drop(self, recorder: Recorder, but: str = "") -> None:
        """Drops gathered parameters that no reader took, except those of one block."""
        for name in [name for name in self.arrived if name not in self.members.get(but, {})]:
            recorder.drop(*self.arrived.pop(name))


def paths_of(hops: Sequence[Hop]) -> dict[str, tuple[Hop, ...]]:
    """Returns collectives by the time of a step at which they run; see `Hop.when`."""
    whens = dict.fromkeys(hop.when for hop in hops)
    return {when: tuple(hop for hop in hops if hop.when == when) for when in whens}


def one_call(hops: Sequence[Hop]) -> Collective:
    """Returns one collective for several tensors, given the hop of each tensor."""
    nbytes, quantised = (
        sum(sizes) for sizes in zip(*((h.call.nbytes, h.call.quantised) for h in hops), strict=True)
    )
    return replace(hops[0].call, nbytes=nbytes, quantised=quantised)


def titled(what: str, weights: Sequence[Weight]) -> str:
    """Returns how tasks call the parameters, or what belongs to each of them."""
    return f"{what} of {weights[0].name}" if len(weights) == 1 else f"{len(weights)} {what}s"


def path_key(weight: Weight, when: str) -> Path:
    """Returns the key that parameters share if their collectives can be one call."""
    return tuple(hop.way for hop in weight.path(when))
