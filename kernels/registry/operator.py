"""What a kernel's file says of it: one frozen value, from which everything else is derived.

torch's schema comes from the signature, shape checks from the factor string that the planner shards
by, the bytes that are moved from which operands are written. Factor strings are in the notation of
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
# Of a result in another precision of arithmetic: what rounding differently in a few places leaves.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-4, torch.float16: 2e-4}

Args = tuple[Any, ...]


class KernelError(ValueError):
    """Operands that an operator cannot take."""


class KernelWarning(RuntimeWarning):
    """A kernel does not take these operands, and its reference runs in its place."""


@dataclass(frozen=True)
class Gradient:
    """How torch differentiates an operator: as `torch.library.register_autograd` takes it.

    Attributes:
        setup: (ctx, inputs, output); keeps what the backward needs.
        backward: (ctx, *gradients of the results) -> gradients of the inputs.
    """

    setup: Callable[..., None]
    backward: Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One operator, `torch.ops.autopar_kernels.<name>` once it is registered.

    Attributes:
        name: of the operator.
        allocate: makes the results, empty, from the operands; None for operators that write into
            operands. Its signature is the operator's.
        launch: (results, *operands); launches the kernel, which fills the results.
        reference: the operator in torch; takes `wide`, the least precise dtype of its arithmetic.
        factors: which factor each dimension of each tensor runs over. It may stop before results
            that the planner does not see.
        samples: argument lists with ragged sizes, for tests.
        typical: an argument list as a large model has it, of a given size as the table of launches
            counts it, or any if that is 0.
        table: the operator's key in the table of launches; "" for one that launches no kernel of
            its own but calls other operators and torch.
        flops: sum of products of factors, as in rules; "out" is the elements of the first result.
        writes: names of the operands that are written.
        passes: how often an operand crosses the memory bus, where that is neither once, for one
            that is read, nor twice, for one that is read and written.
        wrong: what is wrong with these arguments that factors do not tell, "" if nothing is.
        fits: why the kernel does not take these arguments, "" if it does. dtypes are `dtypes`.
        dtypes: of floating operands that the kernel takes.
        gradient: how it is differentiated; None where it is a backward itself, or an update.
        tolerance: relative error allowed by dtype of a result, where it differs from TOLERANCE.
        examples: as in rules, on which the factor string can be proved.
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
        """As rules and graphs name it: "autopar_kernels.rms_norm"."""
        return f"{NAMESPACE}.{self.name}"

    def __call__(self, *args: Any) -> Any:
        """The operator through torch's dispatcher, where autograd sees it."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name)(*args)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Where among the arguments each tensor stands, by name."""
        parameters = inspect.signature(self.allocate).parameters.values()
        return {p.name: i for i, p in enumerate(parameters) if "Tensor" in str(p.annotation)}

    @functools.cached_property
    def terms(self) -> tuple[str, ...]:
        """What the factor string says of each operand."""
        return tuple(term.strip() for term in self.factors.partition("->")[0].split(","))

    def operands(self, args: Sequence[Any]) -> dict[str, Tensor | None]:
        """The tensor arguments by name; None for one that is not given."""
        return {name: args[i] for name, i in self.places.items()}

    def run(self, *args: Any, strict: bool = False) -> Any:
        """The results: by the kernel on a GPU (or in the interpreter), else by the reference.

        A kernel that does not take what it is given is replaced by the reference as well, with a
        warning.

        Raises:
            KernelError: shapes do not fit together, or the kernel does not take the operands and
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
        """The results without their elements, for shape propagation; KernelError as `run`."""
        self.check(args)
        return self.allocate(*args)

    def unfit(self, args: Sequence[Any]) -> str:
        """Why the kernel does not take these arguments; "" if it does."""
        devices = {t.device for t in self.operands(args).values() if t is not None}
        if len(devices) > 1:
            return f"operands on several devices ({', '.join(sorted(map(str, devices)))})"
        for name, tensor in self.operands(args).items():
            if tensor is None or not tensor.is_floating_point() or tensor.dtype in self.dtypes:
                continue
            return f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}"
        return self.fits(*args)

    def check(self, args: Sequence[Any]) -> None:
        """KernelError where sizes of one factor differ, or a rank or another argument is wrong."""
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
        """Bytes that the kernel moves between memory and processor.

        Args:
            operands: the tensor arguments in order, as anything with `nbytes`; None for one that
                is not given.
            results: likewise.
        """
        moved = sum(result.nbytes for result in results)
        for name, operand in zip(self.places, operands, strict=True):
            passes = self.passes.get(name, 2 if name in self.writes else 1)
            moved += 0 if operand is None else passes * operand.nbytes
        return int(moved)


def listed(results: Any) -> tuple[Tensor, ...]:
    """What an operator returns, as a tuple."""
    if results is None:
        return ()
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def sums_of(x: Tensor) -> torch.dtype:
    """The dtype of sums over `x`: float32, or its own if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def wider(x: Tensor, wide: torch.dtype) -> Tensor:
    """x in a dtype at least as precise as `wide`."""
    return x.to(torch.promote_types(x.dtype, wide))


def row_stride(x: Tensor) -> int | None:
    """Elements from one row (the last dimension) to the next, were x of two dimensions.

    None where the rows are not contiguous or not evenly spaced.
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
    """Which of the tensors is not contiguous, in the words of `Operator.fits`."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} with strides {tuple(tensor.stride())}"
    return ""


def evenly_spaced(**tensors: Tensor | None) -> str:
    """Which of the tensors has no `row_stride`, likewise."""
    for name, tensor in tensors.items():
        if tensor is not None and row_stride(tensor) is None:
            return f"{name} with strides {tuple(tensor.stride())}"
    return ""


@functools.cache
def _aligned(term: str, rank: int) -> list[str] | None:
    """The factor of each dimension; those of "..." are counted from the right."""
    words = re.findall(r"\.\.\.|\w+", term)
    leading = rank - len([word for word in words if word != "..."])
    if leading < 0 or (leading and "..." not in words):
        return None
    named = [[f"...{leading - i}" for i in range(leading)] if w == "..." else [w] for w in words]
    return [factor for group in named for factor in group]


def _sizes(tensor: Tensor) -> str:
    return ", ".join(map(str, tensor.shape))
