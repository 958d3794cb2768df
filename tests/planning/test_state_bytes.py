"""Bytes of training state on every rank, counted on the actual tensors: PaRO's Table 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from autopar.ir.state_sharding import Groups, StateSharding, shardings
from autopar.runtime.communication import refetch
from autopar.runtime.parameters.gradients import Gradients
from benchmarks.alive import Alive
from tests.support.ranks import run_ranks
from tests.support.state_sharding import Case, Jobs, tiny

STATES = [str(one) for one in (*shardings(), StateSharding.parse("GGG+I"))]
GROUPS = Groups(4, 2)
ELEMENT = 8  # bytes, of float64
BESIDE = 3000  # bytes of the batch, of losses and of Adam's counts of steps


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class States(Jobs):
    """Programs whose states are counted between two microbatches."""

    def count(self) -> list[dict[str, int]]:
        """Of each case the bytes of parameters, gradients and optimizer state, and of all tensors
        that torch has made and not freed, once the first microbatch of a step is done."""
        return [self._count(number) for number in range(len(self.cases))]

    def _count(self, number: int) -> dict[str, int]:
        program, batch = self.program(number)
        program.step(**batch)
        executor: Any = program._executor
        stage = next(iter(executor.stages.values()))
        weights = stage.weights.all
        found: dict[str, int] = {}
        end, copy = Gradients.end_of_backward, refetch.part_of
        copies: list[int] = []

        def copied(*args: Any) -> Tensor:
            part = copy(*args)
            copies.append(part.nbytes if part.untyped_storage().nbytes() == part.nbytes else 0)
            return part

        def ended(gradients: Gradients) -> None:
            end(gradients)
            if found:
                return
            state = [t for s in program.optimizer.state.values() for t in s.values() if t.ndim]
            held = [tensor for weight in weights for tensor in (weight.held, weight.updated)]
            found["params"] = bytes_of(held)
            # What is only all_reduced autograd adds up itself.
            grads = [tensor.grad for tensor in held if tensor.grad is not None]
            grads += [known.total for known in gradients._sums.values()]
            found["grads"] = bytes_of(grads)
            found["optimizer"] = bytes_of(state)
            found["alive"] = alive.live

        executor.optimizer.zero_grad(set_to_none=True)
        known = [*batch.values(), *stage.tensors]
        known += [t for s in program.optimizer.state.values() for t in s.values()]
        with (
            Alive(known) as alive,
            patch.object(Gradients, "end_of_backward", ended),
            patch.object(refetch, "part_of", copied),
        ):
            program.step(**batch)
        if "+" in self.cases[number].state:
            found["copies"] = sum(copies) // 2  # of two microbatches
        return found


def check(states: Sequence[str]) -> None:
    """Between two microbatches nothing is alive but what the table lists, on no rank."""
    cases = [Case(state, 2) for state in states]
    ranks = run_ranks(States(cases).count)
    numel = sum(p.numel() for p in tiny()[0].parameters())
    for number, case in enumerate(cases):
        # The table's numbers have two bytes; Adam's two moments have as many as the parameter.
        table = StateSharding.parse(case.state).memory(numel, GROUPS, optimizer_bytes=4)
        for rank in ranks:
            found = rank[number]
            alive, copies = found.pop("alive"), found.pop("copies", 0)
            assert 0 <= alive - sum(found.values()) < BESIDE, (case, alive, found)
            found["params"] += copies
            assert found == {name: nbytes * ELEMENT / 2 for name, nbytes in table.items()}, case


def test_the_bytes_of_states_are_those_of_the_table() -> None:
    check(["IIG", "GGG+I"])


@pytest.mark.slow
def test_the_bytes_of_all_fourteen_are_those_of_the_table() -> None:
    check(STATES)
