"""Execution: how a system runs the kernels of a plan, where this changes predicted times.

The same layouts cost a different time under a compiler that makes one kernel of neighbouring
operators, with query, key and value as one product, or with a loss in single steps. A value is
written as settings, "compiled=blocks merged loss=steps host=compiled optimizer=28":

    compiled=blocks     operators of a repeated block between two products are one kernel, as
                        torch.compile makes them; compiled=all those outside of blocks too, and
                        the update, which then has no temporaries
    fused=mul+softmax   operators of these names that follow one another are one kernel; several
                        chains are separated by commas
    merged              linears that read the same value are one product
    loss=steps          a cross entropy is a kernel for each of its steps; loss=inplace is the same,
                        each in the memory of the logits, as Megatron's; loss=compiled reads and
                        writes the logits once in each direction
    reductions=steps    softmaxes, norms and a compiled loss read their operand again for each
                        reduction, as a compiler that ends a kernel there makes them (XLA until
                        2023: Snider & Liang, arXiv 2301.13062, section III), and exponentials
                        are written, because it computes none twice
    convolutions=direct no algorithm of a convolution is chosen by measuring: none is Winograd's
    waits               collectives of parameters and gradients take turns with kernels
    together            gradients are reduced in place by one call behind the backward, and are
                        whole until then
    ahead               updated parameters are gathered beside the next step's forward, as by
                        Megatron's overlap_param_gather; by default, the step waits for them
    adds                products add the gradients of weights to those of earlier microbatches, as
                        Megatron's gradient_accumulation_fusion; their further bytes are hidden.
                        By default, a kernel for each weight reads both and writes the sum
    copies              gathered parameters are copied out of the message, and gradients into the
                        one that reduces them, beside no other kernel, as by torch's FSDP2, and by
                        XLA, which gathers along the dimension that varies slowest in memory
    linears=float8      products of the linears of blocks are in 8 bits with a scale for each
                        tensor; float8-rows with one for each row, mxfp8 for every 32 values. Of
                        all settings, programs run the first two of these alone
    joined              these, too, overlap with collectives under async_tensor_parallel, as
                        torch.compile joins them. Programs of autopar run them one after the other
    primary             their weights are kept in 8 bits (TransformerEngine's primary weights), so
                        that products cast activations and gradients alone
    deterministic       the backward of fused attention adds in a fixed order (cost/
                        attention_seconds.py)
    host=eager          the host issues kernels as so executed: a row of cost/tables/hosts.csv
    optimizer=60        bytes that the optimizer's step moves for each parameter of a device
    reserve=15%         the share of what the allocator holds that is not alive: memory is then what
                        it holds, and the default limit all of a device's
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.errors import OptionError

REGIONS = ("blocks", "all")
LOSSES = ("steps", "inplace", "compiled")
REDUCTIONS = ("steps",)
CONVOLUTIONS = ("direct",)
NARROW = ("float8", "float8-rows", "mxfp8")
_FLAGS = (
    "merged", "waits", "together", "ahead", "adds", "copies", "joined", "primary", "deterministic"
)  # fmt: skip
_NUMBERS = ("optimizer", "reserve")
_KNOWN = {
    "compiled": REGIONS, "loss": LOSSES, "reductions": REDUCTIONS, "linears": NARROW,
    "convolutions": CONVOLUTIONS,
}  # fmt: skip


@dataclass(frozen=True)
class Execution:
    """Settings of how kernels are run; see the module. The default runs one for each operator.

    Attributes:
        compiled: "", "blocks" or "all".
        fused: chains of operator names, each of which is one kernel.
        merged: whether linears that read the same value are one product.
        waits: whether collectives of parameters and gradients take turns with kernels.
        together: whether gradients are reduced by one call behind the backward.
        ahead: whether updated parameters are gathered beside the next step's forward.
        adds: whether products add the gradients of weights to those of earlier microbatches.
        copies: whether parameters are copied out of messages, and gradients into them.
        loss: "", "steps", "inplace" or "compiled".
        reductions: "" or "steps".
        convolutions: "" or "direct".
        linears: "" or the 8-bit format of the linears of blocks.
        joined: whether these linears overlap with collectives.
        primary: whether their weights are kept in 8 bits.
        deterministic: whether the backward of fused attention adds in a fixed order.
        host: a row of the table of hosts; "" if work is issued at once.
        optimizer: bytes for each parameter; 0 for those that the plan's update moves.
        reserve: the share of the allocator's bytes that no tensor uses.

    Raises:
        OptionError: a value is not one of these.
    """

    compiled: str = ""
    fused: tuple[tuple[str, ...], ...] = ()
    merged: bool = False
    waits: bool = False
    together: bool = False
    ahead: bool = False
    adds: bool = False
    copies: bool = False
    loss: str = ""
    reductions: str = ""
    convolutions: str = ""
    linears: str = ""
    joined: bool = False
    primary: bool = False
    deterministic: bool = False
    host: str = ""
    optimizer: float = 0.0
    reserve: float = 0.0

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in ("", *known):
                raise _unreadable(
                    f"{name}={getattr(self, name)}", f"{name} is one of {', '.join(known)}"
                )
        for name, most in zip(_NUMBERS, (1e4, 0.9), strict=True):
            if not 0 <= getattr(self, name) <= most:
                raise _unreadable(
                    f"{name}={getattr(self, name)}", f"{name} is between 0 and {most:g}"
                )
        if any(len(chain) < 2 or not all(chain) for chain in self.fused):
            raise _unreadable(str(self), "a chain has two operators or more")

    @classmethod
    def read(cls, given: str | Execution) -> Execution:
        """Parses the text of an execution; raises OptionError if it cannot be read."""
        if isinstance(given, Execution):
            return given
        values: dict[str, object] = {}
        for word in given.split():
            name, sign, value = word.partition("=")
            if name not in {field.name for field in fields(cls)} or name in values:
                raise _unreadable(word, f"settings are {', '.join(f.name for f in fields(cls))}")
            if bool(sign and value) == (name in _FLAGS):
                raise _unreadable(word, f"all settings but {', '.join(_FLAGS)} have a value")
            values[name] = _value(name, value, word)
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name == "fused":
                words.append("fused=" + ",".join("+".join(chain) for chain in value))
            elif field.name in _FLAGS:
                words.append(field.name)
            else:
                text = f"{value:g}" if field.name in _NUMBERS else value
                words.append(f"{field.name}={text}")
        return " ".join(words)


def _value(name: str, text: str, word: str) -> object:
    if name in _FLAGS:
        return True
    if name == "fused":
        return tuple(tuple(chain.split("+")) for chain in text.split(","))
    if name not in _NUMBERS:
        return text
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise _unreadable(word, f"{name} is a number") from None


def _unreadable(what: str, why: str) -> OptionError:
    return OptionError(
        f"cannot read the execution {what!r}",
        why=why,
        todo='write such as "compiled=blocks merged loss=steps host=compiled optimizer=28"',
    )


AS_WRITTEN = Execution()


@dataclass(frozen=True)
class Part:
    """Share of one operator in the kernels that run it and others; see kernel_parts.py.

    Attributes:
        fused: whether it is part of a kernel of several operators.
        reads: the inputs that it is the first of its kernel to read, from outside the kernel.
        readers: kernels outside that read its result; 0 if it is not written.
        share: the part of a joined product that is its own.
        narrow: the 8-bit format of its product.
        casts: whether its first operand is cast for it, rather than for an earlier reader.
        primary: whether its weight is kept in that format, and not cast.
        sums: for a shared value, the number of gradients that are added; -1 for all readers.
        loss: how a cross entropy runs, as in `Execution`.
        rereads: whether it reads its operand again for each of its reductions.
        direct: whether it is a convolution that multiplies every pixel.
        ordered: whether it is attention whose backward adds in a fixed order.
    """

    fused: bool = False
    reads: tuple[int, ...] = ()
    readers: int = 0
    share: float = 1.0
    narrow: str = ""
    casts: bool = False
    primary: bool = False
    sums: int = -1
    loss: str = ""
    rereads: bool = False
    direct: bool = False
    ordered: bool = False

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = "-".join(map(str, value)) if field.name == "reads" else repr(value)
                words.append(f"{field.name}={text.strip(chr(39))}")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parses the text of a part; raises ValueError for anything else."""
        pairs = dict(word.split("=", 1) for word in text.split())
        kinds: dict[str, type] = {n: type(value) for n, value in vars(WHOLE).items()}
        values: dict[str, object] = {}
        for name, value in pairs.items():
            kind = kinds.get(name)
            if kind is None:
                raise ValueError(f"an operator has no {name!r} in a kernel")
            if kind is tuple:
                values[name] = tuple(map(int, value.split("-")))
            else:
                values[name] = value == "True" if kind is bool else kind(value)
        return cls(**values)  # type: ignore[arg-type]


WHOLE = Part()
