"""Kernels that one device runs for an operator under given layouts, the input of cost models.

Forwards an operator is one kernel. Backwards a matrix product is one product for each input that
needs a gradient, with the same FLOPs and the three lengths permuted. Every other operator reads
its saved tensors and the gradients of its results, and writes the gradients of its inputs. Views
launch no kernel; the gradient of a slice is written into a whole tensor, and the gradients of a
value with several readers are added.

Attention is one fused kernel (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1): two products
forwards, and five backwards, one of which recomputes the weights. The weights are never written to
memory. A causal mask skips half of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cost.attention_seconds import ORDERED
from autopar.cost.model import Gemm, NodeWork, Work
from autopar.cost.work import Convolved
from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.rule import Dims, OpRule, Signature, argument, resolve
from autopar.intra_op.work.kernel_parts_work import as_part
from autopar.intra_op.work.local_work import Layouts, Local
from autopar.intra_op.work.lookup_work import SORT, look_up, sort
from autopar.ir.executed.library_kernels import CONVOLUTIONS, MULTIPLIED, SORTS, base, is_library
from autopar.ir.graph import EXTEND, PREFIX, WRITE, Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import DTYPE_BYTES, TensorType
from autopar.operators.attention.sequence_forms import ATTENTION, SINKS, busiest_share
from autopar.operators.device_work import CHUNK
from autopar.operators.expert_load import imbalance
from autopar.operators.form import Part
from autopar.operators.forms import form_named
from autopar.operators.mixture import MIXTURE, by_name, dispatch_axes
from autopar.stage_plan import StagePlan

# Operators that read only as much of their first operand as they write.
_LOOK_UPS = ("embedding", "gather", "index_select", "index")
# Elementwise operators of two operands, with one kernel for the gradient of each.
_BINARY = ("mul", "div", "pow", "atan2", "maximum", "minimum", "where", "sub", "rsub")
_SUMS = ("add", "sub", "expand")  # an operand's gradient is the result's, or a sum of it
_PARTS = ("slice", "select", "narrow")
_SPLITS = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split")


def node_work(
    graph: Graph,
    node: Node,
    operands: Layouts,
    results: Layouts,
    signature: Signature | None,
    mesh: Mesh,
    form: str = "",
) -> NodeWork:
    """Returns the kernels of `node`, run once, on the busiest device.

    Args:
        graph: normalised and annotated.
        node: one of its nodes.
        operands, results: layouts of its inputs and results, in the order of `node.inputs` and
            `node.types`.
        signature: its rule applied to it; None if it has no rule and runs whole.
        mesh: the devices.
        form: name of its implementation; "" for the operator without a form.

    Returns:
        Kernels with local FLOPs and bytes. Leaves have none, nor do views forwards; `backward` is
        empty if no gradient flows.
    """
    if node.is_leaf or not node.types or node.name in graph.aside:
        return NodeWork()
    own = form_named(node.op, form).work if form else None
    if own is not None:
        work = own(Part(node, operand_types(graph, node), tuple(operands), mesh))
        return work if node.requires_grad else NodeWork(work.forward)
    local = Local(graph, node, operands, results, signature, mesh)
    return as_part(local, _by_itself(local))


def _by_itself(local: Local) -> NodeWork:
    """Returns the kernels of an operator that runs by itself."""
    node, signature = local.node, local.signature
    if node.op == MIXTURE and signature is not None:
        return _mixture(local, signature)
    if node.op == SINKS:
        return _attention(local)
    if node.op == EXTEND:
        return NodeWork((local.work(0.0, 2 * local.operands[-1].nbytes),))
    if node.alias is not None or (node.op.startswith("autopar.") and node.op != WRITE):
        return NodeWork((), _view_gradient(local) if node.requires_grad else ())
    if node.op.startswith(PREFIX):
        return _kernel(local, node.op.removeprefix(PREFIX))
    name = base(node.op)
    products = name in MULTIPLIED and is_library(name, len(local.operands))
    if products and signature is not None and len(local.operands) > 1:
        return _product(local, signature, *MULTIPLIED[name])
    write = _KERNELS.get(name)
    if write is not None:
        return write(local)
    return _plain(local, name)


def works(graph: Graph, plan: StagePlan, table: dict[str, OpRule]) -> dict[str, NodeWork]:
    """Returns the kernels of every node of `graph.folded` under a plan, each run once.

    A node of a repeated block runs `graph.multiplicity[name]` times a step.

    Args:
        graph: prepared, with its repeats.
        plan: a plan with a layout for every such node.
        table: rules by operator.
    """
    kernels = {}
    for node in graph.folded:
        entry = plan.nodes[node.name]
        rule = table.get(node.op)
        signature = None
        if rule is not None and not node.is_leaf:
            signature = resolve(rule, node, operand_types(graph, node), node.types)
        operands, results = ([layout for _, layout in s] for s in (entry.operands, entry.results))
        kernels[node.name] = node_work(
            graph, node, operands, results, signature, plan.mesh, entry.form
        )
    return kernels


def fused(chain: Sequence[Work], nbytes: float) -> Work:
    """Returns one kernel for a chain: the sum of FLOPs, one launch, and the bytes at the ends.

    Args:
        chain: kernels that run one after another, none with a `gemm`.
        nbytes: bytes that the chain reads from outside, and bytes of its results that are read
            later.
    """
    return Work("fused", math.fsum(work.flops for work in chain), nbytes, chain[0].dtype)


def _product(local: Local, signature: Signature, left: int, right: int) -> NodeWork:
    """Returns a matrix product and the products for the gradients of its operands.

    A factor that the result lacks is contracted (k). A factor of both operands belongs to the
    batch, any other to m or n.
    """
    a, b = (_factors(signature.operands[i]) for i in (left, right))
    out = _factors(signature.results[0])
    lengths = {"batch": 1, "m": 1, "n": 1, "k": 1}
    for factor, size in local.sizes.items():
        if factor not in a | b:
            continue
        side = "m" if factor in a else "n"
        side = "batch" if factor in a & b else side
        lengths[side if factor in out else "k"] *= size
    types = (local.operands[left], local.operands[right], local.results[0])
    gemm = Gemm(
        **lengths, rows=math.gcd(*(kind.shape[-1] for kind in types if len(kind.shape) > 1))
    )
    whole = sum(local.operands[i].nbytes for i in (left, right)) + local.results[0].nbytes
    added = local.read + local.written - whole
    forward = local.work(gemm.flops, whole + added, gemm)
    backward = []
    shapes = {left: replace(gemm, n=gemm.k, k=gemm.n)}
    shapes[right] = replace(gemm, m=gemm.k, k=gemm.m)
    for i, wanted in enumerate(local.wanted if local.node.requires_grad else ()):
        if wanted and i in shapes:
            backward.append(local.gradient(gemm.flops, whole, shapes[i]))
        elif wanted:  # a bias: its gradient is a sum of the result's
            backward.append(_sum_gradient(local, local.operands[i]))
    return NodeWork((forward,), tuple(backward))


def _factors(dims: Dims) -> set[str]:
    return {factor for dim in dims for factor in dim}


def _sum_gradient(local: Local, operand: TensorType) -> Work:
    """Returns the kernel that sums the result's gradient for an operand that was broadcast."""
    read = local.results[0].nbytes
    return local.gradient(local.results[0].numel, read + operand.nbytes)


def _attention(local: Local) -> NodeWork:
    """Returns fused attention's two products as one: m queries, n keys, k twice the head size."""
    query, key, value = (tensor.shape for tensor in local.operands[:3])
    keys = key[-2]
    if argument(local.node, 5, "is_causal") is True:
        keys = (keys + 1) // 2
    elif local.node.op == SINKS:  # it computes only blocks in which a query sees a key
        keys = math.ceil(keys * busiest_share(local.node, keys, 1))
    batch = math.prod(local.results[0].shape[:-2])
    d, e = query[-1], value[-1]
    gemm = Gemm(batch, query[-2], keys, d + e, rows=0)
    forward = local.work(gemm.flops, local.read + local.written, gemm)
    forward = replace(forward, op=ATTENTION)  # sinks cost no more
    if not local.node.requires_grad:
        return NodeWork((forward,))
    back = Gemm(batch, query[-2], keys, 3 * d + 2 * e, rows=0)
    moved = 2 * (local.read + local.written)  # each tensor and its gradient
    backward = local.gradient(back.flops, moved, back)
    name = ORDERED if local.node.part.ordered else f"{ATTENTION} backward"
    return NodeWork((forward,), (replace(backward, op=name),))


def _kernel(local: Local, name: str) -> NodeWork:
    """Returns a fused kernel's work: each operand crosses the memory bus once."""
    if name == "linear_cross_entropy":
        return _chunked_loss(local)
    forward = local.work(local.flops, local.read + local.written + local.extra)
    if not local.node.requires_grad:
        return NodeWork((forward,))
    gradients = sum(
        tensor.nbytes for tensor, needs in zip(local.operands, local.wanted, strict=True) if needs
    )
    if name.startswith("add_"):  # both terms share one gradient
        gradients -= local.operands[1].nbytes if all(local.wanted[:2]) else 0
    moved = local.written + local.saved + local.extra + gradients
    flops = _BACKWARD_FLOPS.get(name, 2.0) * local.flops
    return NodeWork((forward,), (local.gradient(flops, moved),))


def _chunked_loss(local: Local) -> NodeWork:
    """Returns the work of `kernels.linear_cross_entropy`, whose backward only scales gradients.

    Forwards it computes three products, a chunk of rows at a time; each reads the weight again or
    adds to its gradient in at least f32. Statistics read the logits, whose gradient overwrites
    them.
    """
    x, weight, labels = local.operands
    rows, (words, features) = labels.numel, weight.shape
    size = DTYPE_BYTES[x.dtype]
    chunks, logits, wide = -(-rows // CHUNK), rows * words * size, max(size, 4) * weight.numel
    gemm = Gemm(1, rows, words, features, math.gcd(words, features))
    product = local.work(gemm.flops, x.nbytes + chunks * weight.nbytes + logits, gemm)
    if not local.node.requires_grad:
        return NodeWork((product, local.work(5.0 * rows * words, logits + labels.nbytes)))
    passes = local.work(10.0 * rows * words, 3.0 * logits + 2 * labels.nbytes)
    into_x = replace(gemm, n=features, k=words)
    into_weight = replace(into_x, m=words, k=rows)
    rounded = 0 if wide == weight.nbytes else wide + weight.nbytes
    forward = (
        product,
        passes,
        local.work(gemm.flops, logits + chunks * weight.nbytes + x.nbytes, into_x),
        local.work(gemm.flops, logits + x.nbytes + chunks * wide, into_weight),
        local.work(weight.numel * chunks, (3.0 * chunks + 1) * wide + rounded),
    )
    return NodeWork(forward, tuple(local.gradient(t.numel, 2.0 * t.nbytes) for t in (x, weight)))


def _mixture(local: Local, signature: Signature) -> NodeWork:
    """Returns a mixture's products for the rows of local experts, assuming equal load.

    In addition to the products, rows are sorted by expert and gathered, gates are multiplied, and
    the results are scaled and summed in the dtype of the weights; the backward does the same. Fused
    kernels scale and sum the rows while they read them, without intermediate writes.
    """
    named = by_name(local.node, local.operands)
    down, x, ids, weights = (named[name] for name in ("down", "x", "ids", "weights"))
    experts, width, inner = down.shape
    over = math.prod(map(local.mesh.axis_size, dispatch_axes(local.node, local.into)))
    busy = imbalance(local.node, local.whole(0), local.into[0], local.mesh)
    rows = math.ceil(ids.numel * over * experts / signature.sizes["e"] * busy)
    each, size = -(-rows // experts), DTYPE_BYTES[x.dtype]
    wide, narrow = size * rows * width, size * rows * inner
    moved = down.nbytes + wide + narrow
    kernels = bool(local.node.keyword("kernels"))
    exact = 0 if kernels else DTYPE_BYTES[weights.dtype] * rows * width

    def products(make: Callable[..., Work], *lengths: tuple[int, int, int]) -> list[Work]:
        gemms = [Gemm(experts, *length, math.gcd(width, inner)) for length in lengths]
        return [make(gemm.flops, moved, gemm) for gemm in gemms]

    into, out = (each, inner, width), (each, width, inner)
    firsts = 1 + ("gate" in named)
    forward = products(local.work, *[into] * firsts, out)
    forward.append(local.work(2 * rows * inner, SORT * ids.nbytes + 2 * wide + 3 * narrow))
    forward.append(local.work(2 * rows * width, wide + 3 * exact + local.written))
    backward: list[Work] = []
    if local.node.requires_grad:
        backward += products(local.gradient, into, *[out] * firsts)
        own = (*[(inner, width, each)] * firsts, (width, inner, each))
        wanted = [gemm for gemm, needs in zip(own, local.wanted, strict=False) if needs]
        backward += products(local.gradient, *wanted)
        read = local.results[0].nbytes if not kernels else wide  # one row of the result for each
        backward.append(local.gradient(4 * rows * width, 2 * wide + 3 * exact + read))
        backward.append(local.gradient(4 * rows * inner, 6 * narrow))
        backward.append(local.gradient(2 * rows * width, (5 - kernels) * wide + x.nbytes))
    return NodeWork(tuple(forward), tuple(backward))


def _convolution(local: Local) -> NodeWork:
    """Returns a convolution as an implicit matrix product.

    Its lengths are pixels x output channels x (input channels x kernel).

    Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", arXiv 1410.0759, section 3.
    """
    image, weight, out = local.operands[0], local.operands[1], local.results[0]
    channels = weight.shape[0]
    transposed = "transpose" in local.node.op
    pixels = (image.numel if transposed else out.numel) // max(channels, 1)
    groups = argument(local.node, 6, "groups", 1)
    groups = groups if isinstance(groups, int) and channels % groups == 0 else 1
    n, k = channels // groups, weight.numel // max(channels, 1)
    gemm = Gemm(groups, pixels, *((k, n) if transposed else (n, k)), rows=0)
    fast = not transposed and groups == 1 and _winograd(local.node, weight)
    forward = local.work(gemm.flops, local.read + local.written, gemm)
    forward = replace(forward, convolved=Convolved("forward", fast))
    moved = image.nbytes + weight.nbytes + out.nbytes
    backward = []
    gradients = (
        (replace(gemm, n=gemm.k, k=gemm.n), Convolved("image", fast)),
        (Gemm(gemm.batch, gemm.k, gemm.n, gemm.m, rows=0), Convolved("weight", fast)),
    )
    for i, wanted in enumerate(local.wanted if local.node.requires_grad else ()):
        if wanted and i < len(gradients):
            work = local.gradient(gemm.flops, moved, gradients[i][0])
            backward.append(replace(work, convolved=gradients[i][1]))
        elif wanted:
            backward.append(_sum_gradient(local, local.operands[i]))
    return NodeWork((forward,), tuple(backward))


def _winograd(node: Node, weight: TensorType) -> bool:
    """Returns whether Winograd's transforms apply: to kernels of 3 x 3 that move by one pixel."""
    given = (argument(node, 3, "stride", 1), argument(node, 5, "dilation", 1))
    steps = (step if isinstance(step, (list, tuple)) else (step,) for step in given)
    near = all(set(step) == {1} for step in steps)
    return weight.shape[2:] == (3, 3) and near and not node.part.direct


def _plain(local: Local, name: str) -> NodeWork:
    """Returns the work of an operator on vector units, bound by memory."""
    forward = local.work(local.flops, local.read + local.written + local.extra)
    if not local.node.requires_grad:
        return NodeWork((forward,))
    wanted = [t for t, needs in zip(local.operands, local.wanted, strict=True) if needs]
    if name in _SUMS:
        return NodeWork((forward,), _passed_on(local, wanted, negated=name == "sub"))
    given = local.written
    if name in _BINARY and len(wanted) > 1:
        each = local.saved / len(wanted) + given
        backward = [local.gradient(local.flops, each + given) for _ in wanted]
        backward += _passed_on(local, wanted)
        return NodeWork((forward,), tuple(backward))
    gradients = sum(tensor.nbytes for tensor in wanted)
    moved = given + local.saved + local.extra + gradients
    return NodeWork((forward,), (local.gradient(local.flops, moved),))


def _passed_on(
    local: Local, wanted: Sequence[TensorType], negated: bool = False
) -> tuple[Work, ...]:
    """Returns the kernels that pass a gradient on: none for an equal shape, else a sum."""
    whole = local.results[0]
    sums = [_sum_gradient(local, tensor) for tensor in wanted if tensor.shape != whole.shape]
    if negated:
        sums.append(local.gradient(whole.numel, 2 * whole.nbytes))
    return tuple(sums)


def _view_gradient(local: Local) -> tuple[Work, ...]:
    """Returns the backward kernels of a view."""
    node, given = local.node, local.written
    name = base(node.op)
    if node.op == "autopar.share":
        readers = sum(local.graph[user].requires_grad for user in local.graph.users[node.name])
        return tuple(local.gradient(node.type.numel, 3 * given) for _ in range(readers - 1))
    if name in _PARTS and local.operands[0].nbytes > given:
        return (local.gradient(0.0, local.operands[0].nbytes + 2 * given),)
    if name in _SPLITS:
        return (local.gradient(0.0, 2 * given),)
    if name in _SUMS and local.operands[0].nbytes < given:
        return (_sum_gradient(local, local.operands[0]),)
    return ()


# FLOPs of a kernel's backward relative to its forward, from the files of the kernels; others count
# twice, for two operands whose gradients take as much each.
_BACKWARD_FLOPS = {
    "rms_norm": 10 / 4, "add_rms_norm": 10 / 5, "add_layer_norm": 14 / 8,
    "swiglu": 12 / 7, "geglu": 12 / 7, "rotary": 1.0, "gelu": 2.0,
}  # fmt: skip
_KERNELS: dict[str, Callable[[Local], NodeWork]] = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(_LOOK_UPS, look_up),
    **dict.fromkeys(SORTS, sort),
}
