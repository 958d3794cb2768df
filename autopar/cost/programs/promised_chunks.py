"""The chunks that each GPU must hold after an execution plan, as its collective defines them.

A plan of point-to-point messages, "sendrecv", does not state who sends to whom. Each GPU must
receive the whole input of one other GPU, and send its own to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.cost.programs.execution_plan import COLLECTIVES, ExecutionPlan
from autopar.errors import CollectiveError

Value = frozenset[tuple[int, int]]  # (rank, chunk) of all inputs that a chunk contains
_MESSAGES = "sendrecv"


def promised_chunks(
    plan: ExecutionPlan, first_of: Callable[[int], Value]
) -> Iterator[tuple[int, str, int, Value]]:
    """Yields rank, buffer, chunk and value of every chunk that the collective must produce.

    Args:
        plan: the plan.
        first_of: returns what the first chunk of a rank's output contains after the plan.

    Raises:
        CollectiveError: the collective is unknown, there are no GPUs, or their numbers of chunks
            differ from those of the collective; or a plan of messages does not send each input to
            one other GPU.
    """
    gpus, kind, where = plan.gpus, plan.collective, f"{plan.collective} by {plan.name}"
    if kind not in (*COLLECTIVES.values(), _MESSAGES):
        known = ", ".join((*COLLECTIVES.values(), _MESSAGES))
        raise CollectiveError(f"{kind} is not supported", where=where, why=f"there are {known}")
    sizes = {(gpu.inputs, gpu.outputs) for gpu in gpus}
    if len(sizes) != 1 or not all(inputs for inputs, _ in sizes):
        why = f"chunks of inputs and outputs: {sorted(sizes)[:8]}"
        raise CollectiveError("GPUs do not have equal inputs", where=where, why=why)
    ((inputs, outputs),) = sizes
    ranks, each = range(len(gpus)), inputs // len(gpus)
    result = "i" if plan.inplace and kind == "allreduce" else "o"
    senders = _senders(plan, first_of) if kind == _MESSAGES else []
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
        elif kind == _MESSAGES:
            for chunk in range(outputs):
                yield rank, "o", chunk, frozenset({(senders[rank], chunk)})
        else:
            for chunk in range(inputs):
                yield rank, "i", chunk, frozenset({(0, chunk)})


def _senders(plan: ExecutionPlan, first_of: Callable[[int], Value]) -> list[int]:
    """Returns the GPU whose input each GPU receives; CollectiveError unless they are paired off."""
    values = [first_of(rank) for rank in range(len(plan.gpus))]
    senders = [min(value)[0] if len(value) == 1 else -1 for value in values]
    if sorted(senders) != list(range(len(senders))) or any(a == b for a, b in enumerate(senders)):
        raise CollectiveError(
            "the messages do not bring each GPU the input of one other",
            where=f"{plan.collective} by {plan.name}",
            why=f"the ranks receive from {senders[:8]}, where -1 is no rank or several",
        )
    return senders
