"""Layouts, calls, sizes and costs that all forms of attention with a split sequence share.

Queries, keys, values and results are split by position over the same axes; the numbers of queries
and keys may differ. Attention with dropout has no such form, because dropout draws random numbers
by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.ir.collective import Collective
from autopar.ir.graph import Arg, Node, Ref
from autopar.ir.rewrite import argument
from autopar.ir.tensor import DTYPE_BYTES
from autopar.operators.device_work import Gemm, NodeWork, Work
from autopar.operators.form import Form, Kwargs, Layouts, Part, Types

ATTENTION = "aten.scaled_dot_product_attention"
SINKS = "autopar.sink_attention"  # with one more logit per head, the keyword `sinks`
KINDS = (ATTENTION, SINKS)
ROWS = 128  # queries that are computed at once under a mask of documents or windows
SEEN = "seen"  # keyword of attention for prices: the share of keys not masked


@dataclass(frozen=True)
class Sizes:
    """Sizes of one device's part of attention, and of the whole.

    Attributes:
        batch: size of the leading dimensions of the result except for heads, and number of heads.
        rows, keys: numbers of a device's queries and keys.
        every: number of keys of all devices.
        width, values: width of a head of keys, and of values.
        query, pair: bytes of a device's queries, and of its keys and values together.
        result: bytes of its result.
        dtype: dtype of all tensors.
    """

    batch: int
    rows: int
    keys: int
    every: int
    width: int
    values: int
    query: int
    pair: int
    result: int
    dtype: str

    @classmethod
    def of(cls, part: Part) -> Sizes:
        """Returns the sizes of attention in given layouts."""
        query, key, value = (part.operand(at) for at in range(3))
        lead = max((t.shape[:-2] for t in (query, key, value)), key=math.prod)
        result = math.prod(lead) * query.shape[-2] * value.shape[-1] * DTYPE_BYTES[query.dtype]
        return cls(
            math.prod(lead), query.shape[-2], key.shape[-2], part.types[1].shape[-2],
            query.shape[-1], value.shape[-1], query.nbytes, key.nbytes + value.nbytes, result,
            query.dtype,
        )  # fmt: skip


def is_causal(node: Node) -> bool:
    """Returns whether attention has the keyword is_causal."""
    return argument(node, 5, "is_causal") is True


def seen(node: Node) -> float:
    """Returns the mean share of keys that a mask leaves to a query; 1 if it is unknown."""
    share = node.keyword(SEEN, 1.0)
    return share if isinstance(share, float) else 1.0


def busiest_share(node: Node, keys: int, devices: int) -> float:
    """Returns the share of keys that a query of the busiest of devices attends to.

    The devices have contiguous parts of the queries. A mask that leaves the average query a share s
    of the keys is taken to leave each query the last f of the keys up to its own position, where
    s = f - f^2 / 2: all of them under a causal mask, and fewer under a window.
    """
    share = 0.5 if is_causal(node) else seen(node)
    if share > (keys + 1) / (2 * keys):
        return 1.0
    reach, before = 1 - math.sqrt(max(1 - 2 * share, 0.0)), 1 - 1 / devices
    if reach <= before:
        return min(1.0, reach + ROWS / keys)
    return ((reach**2 - before**2) / 2 + reach * (1 - reach)) * devices


def mask_of(node: Node) -> Arg:
    """Returns the mask of attention, None for none."""
    return argument(node, 3, "attn_mask")


def specified(mask: tuple[str, str] = ("s", "u!"), least: int = 1) -> Callable[[Node, Types], str]:
    """Returns the factor string of attention whose sequence is split.

    Args:
        mask: the factors of a mask's rows and columns.
        least: minimum number of positions of a part.
    """

    def spec(node: Node, types: Types) -> str:
        if argument(node, 4, "dropout_p", 0.0) != 0 or min(t.shape[-2] for t in types[:3]) < 2:
            return ""
        rank = max(len(t.shape) for t in types[:3])
        lead = [f"b{i}" for i in range(rank - 3)]
        heads, *others = (t.shape[-3] if len(t.shape) > 2 else 1 for t in types[:3])
        grouped = 1 < max(others) < heads
        query = [*lead, *(["(g r)" if grouped else "g"] if rank > 2 else [])]
        key = [*lead, *(["g"] if rank > 2 else []), "t=s"]
        terms = [
            [*query, f"s~{least}", "d!"], [*key, "d!"], [*key, "e!"],
            *([[*query, *mask]] if isinstance(mask_of(node), Ref) else []), query[-1:],
        ]  # fmt: skip
        operands = ", ".join(
            " ".join(
                n if size > 1 else "1"
                for n, size in zip(names[len(names) - len(t.shape) :], t.shape, strict=True)
            )
            for names, t in zip(terms, types, strict=False)
        )
        return f"{operands} -> {' '.join([*query, 's', 'e!'])}"

    return spec


def split(part: Part) -> tuple[str, ...]:
    """Returns the axes that split the sequences of queries and of keys; () without such axes."""
    axes = part.axes(0, -2)
    return axes if axes == part.axes(1, -2) == part.axes(2, -2) else ()


def written(node: Node, types: Types, operands: Layouts) -> tuple[tuple[Arg, ...], Kwargs]:
    """Returns arguments and keywords of the call: operands, mask, options and axes."""
    args: tuple[Arg, ...] = node.args[:3]
    mask = mask_of(node)
    args = (*args, mask) if isinstance(mask, Ref) else args
    kwargs: Kwargs = (("is_causal", True),) if is_causal(node) else ()
    for name in ("scale", "enable_gqa"):
        given = node.keyword(name)
        kwargs += ((name, given),) if given not in (None, False) else ()
    sinks = node.keyword("sinks")
    kwargs += (("sinks", sinks),) if sinks is not None else ()
    axes = operands[0].dims[-2]
    kwargs += (("axis", axes[0] if len(axes) == 1 else axes),)
    return args, (*kwargs, ("size", (types[0].shape[-2], types[1].shape[-2])))


def with_sinks(form: Form) -> tuple[Form, Form]:
    """Returns a form of attention, and that of attention with sinks, which costs no more.

    Its proof needs only the examples of the rule.
    """
    return form, replace(form, op=SINKS, method=f"sink_{form.method}", examples=())


@lru_cache(maxsize=1 << 10)
def collective(kind: str, axes: tuple[str, ...], nbytes: float) -> Collective:
    """Returns a collective with the given bytes per device; a ring sends one over and over."""
    return Collective(kind, axes, round(nbytes))


def gradient_bytes(sizes: Sizes) -> float:
    """Returns the bytes of the gradients of a device's keys and values, in at least float32."""
    return sizes.pair / DTYPE_BYTES[sizes.dtype] * max(DTYPE_BYTES[sizes.dtype], 4)


def sends_for_heads(part: Part, axes: tuple[str, ...]) -> tuple[Collective, Collective]:
    """Returns the exchanges of sequences for heads along axes: of the operands, and of the result.

    Key heads that several devices read are sent to each of them.
    """
    sizes, ways = Sizes.of(part), part.ways(axes)
    query, key = part.operand(0), part.operand(1)
    copies = max(1.0, ways / key.shape[-3]) if query.shape[-3] > key.shape[-3] else 1.0
    into = collective("all_to_all", axes, sizes.query + copies * sizes.pair)
    return into, collective("all_to_all", axes, sizes.result)


def heads_received(part: Part, axes: tuple[str, ...]) -> float:
    """Returns the heads of the device with the most heads, relative to an even distribution."""
    heads, ways = part.operand(0).shape[-3], part.ways(axes)
    return -(-heads // ways) * ways / heads


def kernels(part: Part, share: float, calls: int = 1, more: float = 1.0) -> NodeWork:
    """Returns fused attention of a device's queries and a share of all keys.

    Args:
        part: the device's part.
        share: share of all keys to which each query attends, on the slowest device.
        calls: number of kernels in each direction; each reads its queries and writes its results.
        more: factor on the number of queries of all heads together.
    """
    sizes = Sizes.of(part)
    keys = max(1, round(sizes.every * share / calls))
    d, e = sizes.width, sizes.values
    shared = sizes.pair / max(sizes.keys, 1) * keys
    moved = sizes.query + sizes.result + shared
    rows = round(sizes.rows * more)
    forward = _work(sizes, Gemm(sizes.batch, rows, keys, d + e, rows=0), moved, "")
    back = _work(
        sizes, Gemm(sizes.batch, rows, keys, 3 * d + 2 * e, rows=0), 2 * moved, " backward"
    )
    if calls == 1:
        return NodeWork((forward,), (back,))
    return NodeWork(
        (forward, _merged(sizes, "merge")) * calls, (back, _merged(sizes, "sum")) * calls
    )


def _merged(sizes: Sizes, name: str) -> Work:
    """Returns the kernel that merges a part of results or gradients into a float32 sum."""
    elements = sizes.result / DTYPE_BYTES[sizes.dtype]
    wide = max(DTYPE_BYTES[sizes.dtype], 4)
    return Work(
        f"attention {name}", 3.0 * elements, sizes.result + 2.0 * wide * elements, sizes.dtype
    )


def _work(sizes: Sizes, gemm: Gemm, nbytes: float, suffix: str) -> Work:
    return Work(f"{ATTENTION}{suffix}", gemm.flops, nbytes, sizes.dtype, gemm)


def scores_bytes(part: Part, rows: int, keys: int) -> float:
    """Returns the bytes of scores that a CPU writes to memory; a fused kernel writes none."""
    if part.mesh.device.lower() != "cpu":
        return 0.0
    sizes = Sizes.of(part)
    wide = max(DTYPE_BYTES[sizes.dtype], 4)
    return 2.0 * sizes.batch * rows * keys * wide


def groups(count: int) -> list[range]:
    """Returns the blocks that each call of a zigzag ring delivers: two in the first and last."""
    if count <= 3:
        return [range(count)]
    middle = [range(at, at + 1) for at in range(2, count - 2)]
    return [range(2), *middle, range(count - 2, count)]
