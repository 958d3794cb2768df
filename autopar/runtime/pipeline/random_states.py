"""The CPU's random numbers of a pipeline, which are those of the run without stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from autopar.ir.action import Action, Row
from autopar.runtime.generated import Generated
from autopar.runtime.ranks.channel import Channel
from autopar.runtime.runtime import Runtime


@contextmanager
def random_states(
    row: Row,
    modules: Sequence[Generated],
    microbatches: int,
    runtime: Runtime,
    everyone: Channel | None,
) -> Iterator[Callable[[Action], None]]:
    """Gives what puts the CPU's generator where a forward of the unsharded run would find it.

    That run does one microbatch after the other, each through all stages. So every rank draws and
    forgets what the other stages draw. Afterwards the generators are where it would leave them,
    alike on all ranks.
    """
    if not any(module.random for module in modules):
        yield lambda action: None
        return
    state = [torch.get_rng_state()]
    if everyone is not None:
        everyone.broadcast_objects(state, everyone.ranks[0])
    torch.set_rng_state(state[0])
    own = {(a.microbatch, a.stage) for a in row if a.kind == "F"}
    found: dict[tuple[int, int], Tensor] = {}
    for microbatch in range(microbatches):
        for number, module in enumerate(modules):
            if (microbatch, number) in own:
                found[microbatch, number] = torch.get_rng_state()
            if module.random:
                module.draw(runtime)
    end = torch.get_rng_state()
    yield lambda action: torch.set_rng_state(found[action.microbatch, action.stage])
    torch.set_rng_state(end)
