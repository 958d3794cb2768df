"""Activations of blocks in host memory between forward and backward; see `runtime/offload/`."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.simulate.buffers import Buffer, Recorder


@dataclass(eq=False, slots=True)
class _OffloadedBuffer:
    """A buffer that is offloaded to host memory.

    Attributes:
        source: the buffer on the device, in the forward.
        back: the buffer on the device, in the backward.
        going, coming: the tasks that copy it, -1 for none.
        came: whether it has been fetched, or the copy is under way.
    """

    source: Buffer
    back: Buffer
    going: int
    coming: int = -1
    came: bool = False


@dataclass(eq=False, slots=True)
class OffloadedBlock:
    """A block on the tape whose buffers are fetched before its backward.

    Attributes:
        before: the previous block, whose backward comes next.
        buffers: the buffers that it saves.
        sent: the buffers that this block was the first to offload.
    """

    before: OffloadedBlock | None
    buffers: list[_OffloadedBuffer] = field(default_factory=list)
    sent: list[_OffloadedBuffer] = field(default_factory=list)

    def come(self, recorder: Recorder, overlapped: bool) -> None:
        """Fetches its buffers for its backward, and starts to fetch the previous block's."""
        self._depart(recorder, overlapped)
        tasks = [buffer.coming for buffer in self.buffers if buffer.coming >= 0]
        if tasks:
            recorder.compute("wait for activations", "", (), tasks)
        if overlapped and self.before is not None:
            self.before._depart(recorder, overlapped)

    def _depart(self, recorder: Recorder, overlapped: bool) -> None:
        for buffer in self.buffers:
            if not buffer.came:
                buffer.came = True
                with recorder.aside(overlapped):
                    nbytes, name = buffer.back.nbytes, buffer.back.name
                    buffer.coming = recorder.copy(
                        name, nbytes, True, not overlapped, [buffer.going]
                    )
                    recorder.arrive(buffer.back)


@dataclass
class ActivationOffload:
    """The blocks of a forward that offload their activations.

    Attributes:
        recorder: records the tasks.
        overlapped: whether copies overlap with compute.
        block: the current block, None if it offloads nothing.
        last: the last block that offloaded.
        known: offloaded buffers, by the id of the buffer on the device.
        staying: gathered parameters, which stay on the device, by id.
    """

    recorder: Recorder
    overlapped: bool
    block: OffloadedBlock | None = None
    last: OffloadedBlock | None = None
    known: dict[int, _OffloadedBuffer] = field(default_factory=dict)
    staying: dict[int, Buffer] = field(default_factory=dict)

    def begin(self) -> None:
        """Starts a block that offloads."""
        self.block = OffloadedBlock(self.last)

    def end(self) -> OffloadedBlock:
        """Ends the block, and frees the buffers that the previous block has offloaded."""
        block, self.block = self.block, None
        assert block is not None
        if self.last is not None:
            self.gone(self.last)
        self.last = block
        return block

    def gone(self, block: OffloadedBlock | None = None) -> None:
        """Waits until a block's buffers, by default those of the last one, are in host memory."""
        block = block or self.last
        going = [] if block is None else [b for b in block.sent if b.going >= 0]
        if going:
            self.recorder.compute("wait for the host", "", (), [b.going for b in going])
        for buffer in going:
            self.recorder.drop(buffer.source)

    def leave(self, buffer: Buffer) -> None:
        """Marks a gathered parameter, or its kept part, to stay on the device."""
        if self.block is not None:
            self.staying[id(buffer)] = buffer

    def put(self, saved: list[Buffer]) -> list[Buffer]:
        """Returns the buffers to save for an operator, held; offloaded ones are replaced."""
        return [self._put(buffer) for buffer in saved]

    def _put(self, buffer: Buffer) -> Buffer:
        stays = buffer.kind in ("parameter", "batch") or id(buffer) in self.staying
        if self.block is None or stays or not buffer.nbytes:
            return buffer
        recorder = self.recorder
        offloaded = self.known.get(id(buffer))
        if offloaded is None:
            back = Buffer("activation", buffer.name, buffer.nbytes)
            with recorder.aside(self.overlapped):
                going = recorder.copy(buffer.name, buffer.nbytes, False, not self.overlapped)
            offloaded = self.known[id(buffer)] = _OffloadedBuffer(buffer, back, going)
            self.block.sent.append(offloaded)
            if self.overlapped:
                recorder.hold(buffer)
        if offloaded not in self.block.buffers:
            self.block.buffers.append(offloaded)
        recorder.drop(buffer)
        return recorder.hold(offloaded.back)
