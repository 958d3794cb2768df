"""The chunks that each GPU must hold after an execution plan, as its collective defines them."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.programs.execution_plan import COLLECTIVES, ExecutionPlan
from autopar.errors import CollectiveError

Value = frozenset[tuple[int, int]]  # (rank, chunk) of all inputs that a chunk contains


def promised_chunks(plan: ExecutionPlan) -> Iterator[tuple[int, str, int, Value]]:
    """Yields rank, buffer, chunk and value of every chunk that the collective must produce.

    Raises:
        CollectiveError: the collective is unknown, there are no GPUs, or their numbers of chunks
            differ from those of the collective.
    """
    gpus, kind, where = plan.gpus, plan.collective, f"{plan.collective} by {plan.name}"
    if kind not in COLLECTIVES.values():
        known = ", ".join(COLLECTIVES.values())
        raise CollectiveError(f"{kind} is not supported", where=where, why=f"there are {known}")
    sizes = {(gpu.inputs, gpu.outputs) for gpu in gpus}
    if len(sizes) != 1 or not all(inputs for inputs, _ in sizes):
        why = f"chunks of inputs and outputs: {sorted(sizes)[:8]}"
        raise CollectiveError("GPUs do not have equal inputs", where=where, why=why)
    ((inputs, outputs),) = sizes
    ranks, each = range(len(gpus)), inputs // len(gpus)
    result = "i" if plan.inplace and kind == "allreduce" else "o"
    for rank in ranks:
        if kind == "allreduce":
            for chunk in range(inputs):
                yield rank, result, chunk, frozenset((r, chunk) for r in ranks)
        elif kind == "allgather":
            for source in ranks:
                for chunk in range(inputs):
                    yield rank, "o", source * inputs + chunk, frozenset({(source, chunk)})
        elif kind == "reducescatter":
            for chunk in range(outputs):
                yield rank, "o", chunk, frozenset((r, rank * outputs + chunk) for r in ranks)
        elif kind == "alltoall":
            for source in ranks:
                for chunk in range(each):
                    value = frozenset({(source, rank * each + chunk)})
                    yield rank, "o", source * each + chunk, value
        else:
            for chunk in range(inputs):
                yield rank, "i", chunk, frozenset({(0, chunk)})
