"""What blocks keep in host memory for their backward; see `runtime/offload/activations.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.simulate.buffers import Buffer, Recorder


@dataclass(eq=False, slots=True)
class _Stowed:
    """A buffer in host memory.

    Attributes:
        source: on the device, in the forward.
        back: on the device, in the backward.
        going, coming: the tasks that move it, -1 for none.
        came: whether it has come, or is on its way.
    """

    source: Buffer
    back: Buffer
    going: int
    coming: int = -1
    came: bool = False


@dataclass(eq=False, slots=True)
class Stowed:
    """A block on the tape whose buffers come back before its backward.

    Attributes:
        before: the block before it, which the backward reaches next.
        buffers: that it keeps.
        sent: those that it was the first to stow.
    """

    before: Stowed | None
    buffers: list[_Stowed] = field(default_factory=list)
    sent: list[_Stowed] = field(default_factory=list)

    def come(self, recorder: Recorder, beside: bool) -> None:
        """Its backward begins: they are there, and those of the block before begin to come."""
        self._depart(recorder, beside)
        tasks = [stowed.coming for stowed in self.buffers if stowed.coming >= 0]
        if tasks:
            recorder.compute("wait for activations", "", (), tasks)
        if beside and self.before is not None:
            self.before._depart(recorder, beside)

    def _depart(self, recorder: Recorder, beside: bool) -> None:
        for stowed in self.buffers:
            if not stowed.came:
                stowed.came = True
                with recorder.aside(beside):
                    nbytes, name = stowed.back.nbytes, stowed.back.name
                    stowed.coming = recorder.copy(name, nbytes, True, not beside, [stowed.going])
                    recorder.arrive(stowed.back)


@dataclass
class Stow:
    """The blocks of a forward that stow what they keep.

    Attributes:
        recorder: takes the tasks.
        beside: whether copies run beside what is computed.
        block: the one that is played, None for none that stows.
        last: the last one that was.
        known: what has been stowed, by the id of the buffer.
        staying: gathered parameters, which are not, by their id.
    """

    recorder: Recorder
    beside: bool
    block: Stowed | None = None
    last: Stowed | None = None
    known: dict[int, _Stowed] = field(default_factory=dict)
    staying: dict[int, Buffer] = field(default_factory=dict)

    def begin(self) -> None:
        """A block begins that stows what it keeps."""
        self.block = Stowed(self.last)

    def end(self) -> Stowed:
        """It ends; what the block before it has sent is gone."""
        block, self.block = self.block, None
        assert block is not None
        if self.last is not None:
            self.gone(self.last)
        self.last = block
        return block

    def gone(self, block: Stowed | None = None) -> None:
        """Wait until what a block has stowed, by default the last, is in host memory."""
        block = block or self.last
        going = [] if block is None else [b for b in block.sent if b.going >= 0]
        if going:
            self.recorder.compute("wait for the host", "", (), [b.going for b in going])
        for stowed in going:
            self.recorder.drop(stowed.source)

    def leave(self, buffer: Buffer) -> None:
        """A gathered parameter, or what is kept of one, stays."""
        if self.block is not None:
            self.staying[id(buffer)] = buffer

    def put(self, saved: list[Buffer]) -> list[Buffer]:
        """What an operator keeps, held: in the place of what goes what will come back."""
        return [self._put(buffer) for buffer in saved]

    def _put(self, buffer: Buffer) -> Buffer:
        stays = buffer.kind in ("parameter", "batch") or id(buffer) in self.staying
        if self.block is None or stays or not buffer.nbytes:
            return buffer
        recorder = self.recorder
        stowed = self.known.get(id(buffer))
        if stowed is None:
            back = Buffer("activation", buffer.name, buffer.nbytes)
            with recorder.aside(self.beside):
                going = recorder.copy(buffer.name, buffer.nbytes, False, not self.beside)
            stowed = self.known[id(buffer)] = _Stowed(buffer, back, going)
            self.block.sent.append(stowed)
            if self.beside:
                recorder.hold(buffer)
        if stowed not in self.block.buffers:
            self.block.buffers.append(stowed)
        recorder.drop(buffer)
        return recorder.hold(stowed.back)
