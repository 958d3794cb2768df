"""Expected results of a training: those of plain loops on one process and the papers' formulas."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tests.fuzz.loops import Loop, Run, loss_of
from tests.fuzz.settings import Settings
from tests.fuzz.stale import StaleLoop
from tests.support.outer_simulation import Rounds


def expected(settings: Settings, stages: Mapping[str, int]) -> list[Run]:
    """Returns the training of each replica, or of the only one.

    Args:
        settings: of the training.
        stages: the stage of each parameter.
    """
    make = partial(StaleLoop, stages=stages) if settings.method else Loop
    loops = [make(settings) for _ in range(settings.replicas)]
    rounds = Rounds(loops[0].model, settings.options.get("outer", "local over node, tau=1000"))
    common, models = settings.made().eval(), [loop.model for loop in loops]
    for step, batch in enumerate(settings.batches(), 1):
        chunks = {name: value.chunk(len(loops)) for name, value in batch.items()}
        parts = [{name: of[n] for name, of in chunks.items()} for n in range(len(loops))]
        if settings.evaluated:
            for loop in loops:
                loop.drained()
            _give(common, rounds.agreed(models))
            with torch.no_grad():
                told = sum(float(loss_of(common(**part))) for part in parts) / len(loops)
            for loop in loops:
                loop.run.evaluations.append(told)
        rates = [loop.step(part) for loop, part in zip(loops, parts, strict=True)]
        rounds.step(step, models, rates[0])
    _give(common, rounds.agreed(models))
    for loop in loops:
        loop.run.losses = loop.told()
        loop.run.weights = {n: v.detach().clone() for n, v in common.state_dict().items()}
        if "ema" in settings.options:
            every = [other.averages for other in loops]
            loop.run.averages = {n: sum(e[n] for e in every) / len(loops) for n in every[0]}
    return [loop.run for loop in loops]


@torch.no_grad()
def _give(model: torch.nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
