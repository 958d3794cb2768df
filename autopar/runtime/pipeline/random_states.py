"""Gives a pipeline the random numbers that the CPU's generator produces without stages."""

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
    """Yields a function that sets the CPU's generator to its state in the unsharded run.

    The unsharded run computes one microbatch after the other, each through all stages. Every rank
    therefore draws and discards the random numbers of the other stages. On exit the generators of
    all ranks have the state that the unsharded run would leave.
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
