"""The description of an operator in its kernel's file, from which everything else is derived.

torch's schema comes from the signature, shape checks from the factor string that the planner also
uses, and the bytes moved from the list of written operands. Factor strings use the notation of
autopar's rules (`autopar/intra_op/rule.py`), which the kernels do not import:

    "... n!, n! -> ... n!, ..."     leading dimensions may be split, the last one must be whole
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .draw import Draw
from .language import available, interpreting

NAMESPACE = "autopar_kernels"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Relative errors allowed for results that are rounded differently in a few places.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-4, torch.float16: 2e-4}

Args = tuple[Any, ...]


class KernelError(ValueError):
    """Operands that an operator does not accept."""


class KernelWarning(RuntimeWarning):
    """A kernel does not support these operands, so that its reference runs instead."""


@dataclass(frozen=True)
class Gradient:
    """An operator's derivative, as `torch.library.register_autograd` takes it.

    Attributes:
        setup: (ctx, inputs, output); saves tensors for the backward.
        backward: (ctx, *gradients of the results) -> gradients of the inputs.
    """

    setup: Callable[..., None]
    backward: Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One operator, `torch.ops.autopar_kernels.<name>` once it is registered.

    Attributes:
        name: name of the operator.
        allocate: allocates empty results for the operands; returns None for operators that write
            into operands. Its signature is the operator's.
        launch: (results, *operands); launches the kernel, which fills the results.
        reference: the operator in torch; takes `wide`, the least precise dtype of its arithmetic.
        factors: the factors of each dimension of each tensor. It may omit trailing results that the
            planner does not use.
        samples: argument lists with ragged sizes, for tests.
        typical: arguments as in a large model, of a given size as the table of launches measures
            it, or of any size if that is 0.
        table: key in the table of launches; "" for operators that launch no kernel of their own but
            call other operators and torch.
        flops: sum of products of factors, as in rules; "out" is the elements of the first result.
        writes: names of the operands that are written.
        passes: number of times that an operand crosses the memory bus, unless once for one that is
            read and twice for one that is read and written.
        wrong: what is wrong with the arguments beyond the factors, "" if nothing is.
        fits: why the kernel does not support the arguments, "" if it does. dtypes are in `dtypes`.
        dtypes: dtypes of floating operands that the kernel supports.
        gradient: its derivative; None if it is itself a backward, or an update.
        tolerance: relative error allowed by dtype of a result, where it differs from TOLERANCE.
        examples: as in rules; the factor string can be proved on them.
    """

    name: str
    allocate: Callable[..., Any]
    launch: Callable[..., None]
    reference: Callable[..., Any]
    factors: str
    samples: Callable[[Draw], Iterable[Args]]
    typical: Callable[[Draw, int], Args]
    table: str
    flops: str = "out"
    writes: tuple[str, ...] = ()
    passes: Mapping[str, float] = field(default_factory=dict)
    wrong: Callable[..., str] = lambda *args: ""
    fits: Callable[..., str] = lambda *args: ""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    gradient: Gradient | None = None
    tolerance: Mapping[torch.dtype, float] = field(default_factory=dict)
    examples: tuple[str, ...] = ()

    @property
    def schema(self) -> str:
        """torch's schema: "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)"."""
        return self.name + torch.library.infer_schema(self.allocate, mutates_args=self.writes)

    @property
    def graph_name(self) -> str:
        """Name in rules and graphs: "autopar_kernels.rms_norm"."""
        return f"{NAMESPACE}.{self.name}"

    def __call__(self, *args: Any) -> Any:
        """Calls the operator through torch's dispatcher, where autograd sees it."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name)(*args)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Index among the arguments of each tensor, by name."""
        parameters = inspect.signature(self.allocate).parameters.values()
        return {p.name: i for i, p in enumerate(parameters) if "Tensor" in str(p.annotation)}

    @functools.cached_property
    def terms(self) -> tuple[str, ...]:
        """Term of the factor string for each operand."""
        return tuple(term.strip() for term in self.factors.partition("->")[0].split(","))

    def operands(self, args: Sequence[Any]) -> dict[str, Tensor | None]:
        """Returns the tensor arguments by name; None for an absent one."""
        return {name: args[i] for name, i in self.places.items()}

    def run(self, *args: Any, strict: bool = False) -> Any:
        """Returns the results of the kernel on a GPU (or in the interpreter), else the reference.

        If the kernel does not support the operands, the reference runs as well, with a warning.

        Raises:
            KernelError: shapes do not fit together, or the kernel does not support the operands and
                `strict` is set.
        """
        self.check(args)
        tensors = [t for t in self.operands(args).values() if t is not None]
        on_gpu = tensors[0].is_cuda and available()
        if not self.table or not (on_gpu or interpreting()) or not all(t.numel() for t in tensors):
            return self.reference(*args)
        if reason := self.unfit(args):
            message = f"the kernel of {self.graph_name} does not take {reason}"
            if strict:
                raise KernelError(message)
            warnings.warn(f"{message}: its reference in torch runs", KernelWarning, stacklevel=2)
            return self.reference(*args)
        results = self.allocate(*args)
        self.launch(results, *args)
        return results

    def fake(self, *args: Any) -> Any:
        """Returns the results without elements, for shape propagation; raises as `run` does."""
        self.check(args)
        return self.allocate(*args)

    def unfit(self, args: Sequence[Any]) -> str:
        """Returns why the kernel does not support the arguments; "" if it does."""
        devices = {t.device for t in self.operands(args).values() if t is not None}
        if len(devices) > 1:
            return f"operands on several devices ({', '.join(sorted(map(str, devices)))})"
        for name, tensor in self.operands(args).items():
            if tensor is None or not tensor.is_floating_point() or tensor.dtype in self.dtypes:
                continue
            return f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}"
        return self.fits(*args)

    def check(self, args: Sequence[Any]) -> None:
        """Raises KernelError if a factor has two sizes, or a rank or another argument is wrong."""
        sizes: dict[str, tuple[int, str]] = {}
        for term, (name, tensor) in zip(self.terms, self.operands(args).items(), strict=True):
            if tensor is None:
                continue
            factors = _aligned(term, tensor.dim())
            wanted = f"{self.graph_name}: {name} is ({_sizes(tensor)}), and must be ({term})"
            if factors is None:
                raise KernelError(wanted)
            for factor, size in zip(factors, tensor.shape, strict=True):
                known, other = sizes.setdefault(factor, (size, name))
                if known != size:
                    raise KernelError(f"{wanted}: in {other} that dimension has {known} elements")
        if wrong := self.wrong(*args):
            raise KernelError(f"{self.graph_name}: {wrong}")

    def nbytes(self, operands: Sequence[Any], results: Sequence[Any]) -> int:
        """Returns the bytes that the kernel moves between memory and processor.

        Args:
            operands: the tensor arguments in order, as objects with `nbytes`; None for an absent
                one.
            results: likewise.
        """
        moved = sum(result.nbytes for result in results)
        for name, operand in zip(self.places, operands, strict=True):
            passes = self.passes.get(name, 2 if name in self.writes else 1)
            moved += 0 if operand is None else passes * operand.nbytes
        return int(moved)


def listed(results: Any) -> tuple[Tensor, ...]:
    """Returns an operator's results as a tuple."""
    if results is None:
        return ()
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def sums_of(x: Tensor) -> torch.dtype:
    """Returns the dtype of sums over `x`: float32, or its own if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def wider(x: Tensor, wide: torch.dtype) -> Tensor:
    """Returns x in a dtype at least as precise as `wide`."""
    return x.to(torch.promote_types(x.dtype, wide))


def row_stride(x: Tensor) -> int | None:
    """Returns the elements from one row (the last dimension) to the next, with x seen as 2D.

    None if the rows are not contiguous or not evenly spaced.
    """
    if x.dim() == 0 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return None
    spaced = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    spaced = [(size, stride) for size, stride in spaced if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(spaced):
        if outer != size * inner:
            return None
    return spaced[-1][1] if spaced else x.shape[-1]


def contiguous(**tensors: Tensor | None) -> str:
    """Names a tensor that is not contiguous, worded for `Operator.fits`; "" if none."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} with strides {tuple(tensor.stride())}"
    return ""


def evenly_spaced(**tensors: Tensor | None) -> str:
    """Names a tensor without a `row_stride`, likewise."""
    for name, tensor in tensors.items():
        if tensor is not None and row_stride(tensor) is None:
            return f"{name} with strides {tuple(tensor.stride())}"
    return ""


@functools.cache
def _aligned(term: str, rank: int) -> list[str] | None:
    """Returns the factor of each dimension; those of "..." are counted from the right."""
    words = re.findall(r"\.\.\.|\w+", term)
    leading = rank - len([word for word in words if word != "..."])
    if leading < 0 or (leading and "..." not in words):
        return None
    named = [[f"...{leading - i}" for i in range(leading)] if w == "..." else [w] for w in words]
    return [factor for group in named for factor in group]


def _sizes(tensor: Tensor) -> str:
    return ", ".join(map(str, tensor.shape))
