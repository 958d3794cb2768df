"""The work of an operator that runs as a part of a kernel, or of one in another format.

See `autopar/passes/kernel_parts.py` for which parts there are. Products in 8 bits have scales. For
"float8" an operand is read for its largest element, then read, scaled and written: 5 bytes for each
of 2, once for all its readers (torchao's dynamic tensorwise scaling). For "float8-rows" every
product casts its operands along each of the two dimensions that are contracted with it. So it does
for "mxfp8" (torchao/prototype/mx_formats/mx_linear.py), whose scales belong to 32 elements, so that
an operand is read once: 3 bytes and a scale each (OCP Microscaling Formats, version 1.0). Primary
weights are kept in 8 bits, in both orders where the format needs them (TransformerEngine, "FP8
primary weights"), and not cast.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.model import Gemm, NodeWork, Work
from autopar.intra_op.work.local_work import Local
from autopar.ir.executed.execution import WHOLE
from autopar.ir.executed.library_kernels import base
from autopar.ir.tensor import DTYPE_BYTES

# Bytes moved for a cast of one element of 16 bits, by format.
_CAST = {"float8": 5.0, "float8-rows": 5.0, "mxfp8": 3.0 + 1 / 32}
# Of each logit in single steps. Forwards: f16 to f32 (6), its maximum (4), difference (8),
# exponential (8), sum (4) and quotient (8), of which the cast is an operator of its own; backwards
# a copy (8) and the product with the loss's gradient (8).
_STEPS = (32.0, 16.0)


# Further passes over an operand for reductions, forwards and backwards. A softmax: a read for its
# maximum, and for its sum a read and a write of exponentials, since XLA duplicates no operation
# that it calls expensive (IsExpensive in instruction_fusion.cc and gpu/fusion_merger.cc); backwards
# the sum of the products of results and gradients, both of which are read. A norm: its moments;
# backwards those two sums, and again those for weight and bias. A loss: maximum, sum, exponentials,
# which its gradient reads, and the labels' terms. A sum over all rows: before what needs it;
# backwards the operand and the gradient, for the sums of both that belong to one row.
_REREADS = {
    "softmax": (3, 2), "log_softmax": (3, 1), "layer_norm": (1, 4), "cross_entropy_loss": (3, 0),
    "sum": (1, 2),
}  # fmt: skip


def as_part(local: Local, whole: NodeWork) -> NodeWork:
    """Returns the work of an operator under its part of a kernel, given its work by itself."""
    work = _as_part(local, whole)
    return _reread(local, work) if local.node.part.rereads else work


def _reread(local: Local, work: NodeWork) -> NodeWork:
    """Returns the work with the repeated reads of reductions, in the stored operand's dtype."""
    node = local.graph[local.node.inputs[0]]
    while node.inputs and (node.alias or (node.part.fused and not node.part.readers)):
        node = local.graph[node.inputs[0]]
    nbytes = float(local.operands[0].numel * DTYPE_BYTES[node.type.dtype])
    sides = [
        (replace(side[0], nbytes=side[0].nbytes + times * nbytes), *side[1:]) if side else ()
        for side, times in zip(
            (work.forward, work.backward), _REREADS[base(local.node.op)], strict=True
        )
    ]
    return NodeWork(*sides)


def _as_part(local: Local, whole: NodeWork) -> NodeWork:
    part = local.node.part
    if part == WHOLE:
        return whole
    if part.fused or part.sums >= 0:
        return _fused(local)
    if part.loss in ("steps", "inplace"):
        return _in_steps(local, whole)
    if not whole.forward:
        return whole
    joined = _joined(whole, part.share)
    return _narrow(local, joined) if part.narrow else joined


def _fused(local: Local) -> NodeWork:
    """Returns the bytes that an operator contributes to its kernel."""
    node, part = local.node, local.node.part
    if part.sums >= 0:
        given, more = local.written, max(part.sums - 1, 0)
        if part.fused:
            sums = [local.gradient(0.0, float(more * given))] if more else []
        else:
            sums = [local.gradient(node.type.numel, 3.0 * given)] * more
        return NodeWork((), tuple(sums) if node.requires_grad else ())
    if node.alias is not None:
        return NodeWork()
    reads = [local.operands[at].nbytes for at in part.reads]
    written = local.written if part.readers else 0
    moved = float(sum(reads) + written + local.extra)
    forward = (local.work(local.flops, moved),) if moved else ()
    if not node.requires_grad:
        return NodeWork(forward)
    gradients = sum(local.operands[at].nbytes for at in part.reads if local.wanted[at])
    back = gradients + part.readers * local.written + local.saved + local.extra
    return NodeWork(forward, (local.gradient(local.flops, float(back)),) if back else ())


def _in_steps(local: Local, whole: NodeWork) -> NodeWork:
    """Returns a loss that is a kernel for each of its steps."""
    logits = local.operands[0].numel
    forward, backward = (
        tuple(replace(work, nbytes=nbytes * logits) for work in side[:1])
        for side, nbytes in zip((whole.forward, whole.backward), _STEPS, strict=True)
    )
    return NodeWork(forward, backward)


def _joined(whole: NodeWork, share: float) -> NodeWork:
    """Returns a linear as a part of a product with 1 / share as many columns.

    Forwards and for the weights, columns are concatenated; for the input, they are summed over.
    """
    if share == 1.0:
        return whole

    def longer(work: Work, length: str, shared: float) -> Work:
        assert work.gemm is not None
        gemm = replace(work.gemm, **{length: round(getattr(work.gemm, length) / share)})
        nbytes = shared + (work.nbytes - shared) / share
        return replace(work, flops=gemm.flops, nbytes=nbytes, gemm=gemm, share=share)

    first = whole.forward[0]
    assert first.gemm is not None
    size = first.nbytes / _elements(first.gemm)
    rows = size * first.gemm.m * first.gemm.k  # the input, or its gradient
    products = [work for work in whole.backward if work.gemm is not None]
    others = tuple(work for work in whole.backward if work.gemm is None)
    into_x = [longer(work, "k", rows) for work in products[:-1]]
    into_weight = [longer(work, "n", rows) for work in products[-1:]]
    return NodeWork((longer(first, "n", rows),), (*into_x, *into_weight, *others))


def _elements(gemm: Gemm) -> int:
    return gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)


def _narrow(local: Local, whole: NodeWork) -> NodeWork:
    """Returns a linear whose products are in 8 bits, with the casts of their operands.

    Backwards the gradient of the result is cast and, for the product with the input, transposed.
    """
    part, (x, weight) = local.node.part, local.operands[:2]
    each, rows = _CAST[part.narrow], part.narrow != "float8"
    given = local.results[0].numel
    there = (x.numel if rows or part.casts else 0) + (0 if part.primary else weight.numel)
    again = each * (given + there) if rows else 2.0 * given

    def narrow(work: Work) -> Work:
        if work.gemm is None:
            return work
        m, n, k = work.gemm.m, work.gemm.n, work.gemm.k
        return replace(work, dtype="f8e4", nbytes=float(m * k + n * k + 2 * m * n))

    casts = local.work(0.0, each * there), local.gradient(0.0, each * given + again)
    return NodeWork(
        (casts[0], *map(narrow, whole.forward)), (casts[1], *map(narrow, whole.backward))
    )
