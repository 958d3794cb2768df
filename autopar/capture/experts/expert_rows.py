"""Placeholders for the tensors in a loop over experts: an expert, its rows, their operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from autopar.capture.stand_ins.dropout import dropout_error
from autopar.errors import CaptureError
from autopar.operators.activation import ACTIVATIONS
from autopar.operators.model_calls.mixture_call import mixture


def refused(name: str, why: str = "how many rows an expert has depends on values") -> CaptureError:
    """Returns the error of a call that is not part of a mixture."""
    if name == "dropout":
        return dropout_error("the rows of an expert, in a loop over experts")
    return CaptureError(
        f"{name} of the rows of an expert, in a loop over experts",
        why=f"{why}; supported are two or three products, elementwise functions, and a weight",
        todo="compute the mixture of experts with autopar.mixture",
    )


class StandIn:
    """A placeholder for a value of a loop over experts; the trace's mode handles its functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises CaptureError for a function that no mode has handled."""
        raise refused(str(getattr(func, "__name__", func)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(name)
        return partial(_method(name), self)

    def __bool__(self) -> bool:
        raise refused("bool")


def _method(name: str) -> Callable[..., Any]:
    """Returns a tensor method that is dispatched to the active mode."""

    def method(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        return handle_torch_function(method, (self,), self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in [
    "mul",
    "rmul",
    "add",
    "radd",
    "sub",
    "rsub",
    "truediv",
    "pow",
    "neg",
    "matmul",
    "getitem",
]:
    setattr(StandIn, f"__{_name}__", _method(f"__{_name}__"))


@dataclass(frozen=True, eq=False)
class Hits(StandIn):
    """The experts that have a row.

    Attributes:
        ids: the experts of every token.
        count: number of experts.
        column: whether each expert is a tensor of one element.
        numbered: whether the loop yields every expert with its own number.
    """

    ids: Tensor
    count: int
    column: bool
    numbered: bool = False

    def __iter__(self) -> Iterator[Expert]:
        first = Expert(self.ids, self.count, 0, self.column, [True] * self.numbered)
        yield first
        if first.numbered:  # it has indexed a list of modules
            for number in range(1, self.count):
                yield replace(first, number=number)


@dataclass(frozen=True, eq=False)
class Expert(StandIn):
    """A placeholder for all experts, or for one expert once its number has been read.

    Attributes:
        ids: the experts of every token.
        count: how many experts there are.
        number: its number.
        column: whether it is a tensor of one element.
        asked: not empty if its number has been read.
        shared: not empty if it has represented all experts.
    """

    ids: Tensor
    count: int
    number: int = 0
    column: bool = False
    asked: list[bool] = field(default_factory=list)
    shared: list[bool] = field(default_factory=list)

    @property
    def numbered(self) -> bool:
        """Returns whether it represents one expert rather than all."""
        return bool(self.asked)

    def __index__(self) -> int:
        if self.shared:
            raise CaptureError(
                "a loop over experts needs the number of an expert whose rows or weights it has",
                why="its body was traced as that of all experts until then",
                todo="ask for the number first, number = int(expert), and use it in the body",
            )
        self.asked.append(True)
        return self.number

    def stands_for_all(self) -> None:
        """Notes that it has no number from now on."""
        self.shared.append(True)

    __int__ = __index__

    def __format__(self, spec: str) -> str:
        """Returns the number as text, by which a module may be looked up."""
        if self.column:
            raise refused("format")
        return format(int(self), spec)

    def __getitem__(self, index: Any) -> Expert:
        if index not in (0, -1):
            raise refused("__getitem__")
        return self.scalar()

    def scalar(self) -> Expert:
        """Returns the expert as a tensor without dimensions."""
        return replace(self, column=False)

    def index(self) -> int | slice:
        """Returns the index of this expert's part in a tensor of all experts."""
        return slice(self.number, self.number + 1) if self.column else self.number

    def __eq__(self, other: object) -> bool:
        return self._holds(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return self._holds(operator.ne, other)

    def __lt__(self, other: object) -> bool:
        return self._holds(operator.lt, other)

    def __ge__(self, other: object) -> bool:
        return self._holds(operator.ge, other)

    def _holds(self, compare: Callable[[int, int], bool], other: object) -> bool:
        """Returns whether a comparison with a number holds; that with their count does for none."""
        if not isinstance(other, int):
            raise refused("a comparison")
        every = {compare(number, other) for number in range(self.count)}
        return every.pop() if len(every) == 1 else compare(int(self), other)

    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Mask(StandIn):
    """A mask over tokens and slots: whether a token chose the expert in that slot."""

    ids: Tensor
    dims: tuple[str, ...]


class Count(StandIn):
    """The number of rows of an expert that has at least one."""

    def __eq__(self, other: object) -> bool:
        if other == 0:
            return False
        raise refused("numel")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: object) -> bool:
        return self != other

    def __bool__(self) -> bool:
        return True

    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Places(StandIn):
    """The tokens, or the slots, of the rows that chose the expert."""

    ids: Tensor
    of: str

    @property
    def shape(self) -> tuple[Count]:
        """The number of rows."""
        return (Count(),)

    def numel(self) -> Count:
        """Returns the number of rows."""
        return Count()


@dataclass(frozen=True, eq=False)
class Weight(StandIn):
    """The weight of the expert, [out, in] or its transpose, or its bias [out].

    Attributes:
        every: the weights of all experts.
        turned: whether it is transposed.
    """

    every: Tensor
    turned: bool = False

    @property
    def T(self) -> Weight:
        """The transpose of the weight."""
        return replace(self, turned=not self.turned)

    mT = T


@dataclass(frozen=True, eq=False)
class Share(StandIn):
    """The routing weights of the rows that chose the expert, [rows, 1] or [rows]."""

    ids: Tensor
    weights: Tensor
    column: bool


@dataclass(frozen=True, eq=False)
class Product:
    """A product of the rows with a weight of each expert.

    Attributes:
        weight: [experts, out, in].
        bias: [experts, out], None for none.
    """

    weight: Tensor
    bias: Tensor | None

    def part(self, start: int, end: int, step: int) -> Product:
        """Returns the product with a range of rows of the weight."""
        run = slice(start, end, step)
        return Product(self.weight[:, run], None if self.bias is None else self.bias[:, run])


@dataclass(frozen=True, eq=False)
class Rows(StandIn):
    """Rows that chose the expert.

    Attributes:
        ids: the experts of every token.
        x: the tokens from which the rows are selected.
        text: the function of the products, which are numbered, such as "mul(silu(@0), @1)"; ""
            for the rows themselves.
        products: the numbered products.
        down: the last product, which is applied to the result of `text`.
        weights: the routing weights by which the rows are multiplied.
    """

    ids: Tensor
    x: Tensor
    text: str = ""
    products: tuple[Product, ...] = ()
    down: Product | None = None
    weights: Tensor | None = None

    @property
    def width(self) -> int:
        """Features of a row."""
        if self.down is not None:
            return self.down.weight.shape[1]
        return self.products[-1].weight.shape[1] if self.products else self.x.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.x.device

    @property
    def shape(self) -> tuple[Any, ...]:
        """Raises CaptureError, because the number of rows is unknown."""
        raise refused("shape")

    def multiplied(self, weight: Tensor, bias: Tensor | None) -> Rows:
        """Returns the product of the rows with weights [experts, out, in]."""
        product = Product(weight, bias)
        if not self.products and not self.text:
            return replace(self, text="@0", products=(product,))
        if self.down is not None or weight.shape[-1] != self.width:
            raise refused("a third product")
        return replace(self, down=product)

    def biased(self, bias: Tensor) -> Rows:
        """Returns the rows with biases [experts, out] added to the last product."""
        last = self.down or (self.products[0] if self.text == "@0" else None)
        if last is None or last.bias is not None or bias.dim() != 2 or self.weights is not None:
            raise refused("add")
        product = Product(last.weight, bias)
        return replace(self, down=product) if self.down else replace(self, products=(product,))

    def joined(self, other: Rows) -> tuple[str, str, tuple[Product, ...]]:
        """Returns the functions of two values of the same rows, and the products of both."""
        same = self.x is other.x and self.ids is other.ids
        if not same or not (self.text and other.text) or (self.down or other.down):
            raise refused("an operation of two rows")
        products, text = list(self.products), other.text
        numbers = {}
        for at, product in enumerate(other.products):
            if not any(product is held for held in products):
                products.append(product)
            numbers[at] = next(n for n, held in enumerate(products) if held is product)
        for at in sorted(numbers, reverse=True):
            text = text.replace(f"@{at}", f"#{numbers[at]}")
        return self.text, text.replace("#", "@"), tuple(products)

    def mixture(self) -> Tensor:
        """Returns the mixture in which every expert computes this function of its rows."""
        if self.down is None or self.weights is None or len(self.products) > 2:
            raise refused("index_add_", "an expert is two or three products and a weight")
        gate, up, text = _named(self.text, self.products)
        biases = (None if gate is None else gate.bias), up.bias, self.down.bias
        return mixture(
            self.x, self.ids, self.weights, up.weight, self.down.weight,
            gate=None if gate is None else gate.weight, activation=text, biases=biases,
        )  # fmt: skip


def _named(text: str, products: tuple[Product, ...]) -> tuple[Product | None, Product, str]:
    """Returns the gate product or None, the other product, and the function of both."""
    if len(products) == 1:
        text = text.replace("@0", "up")
        simple = {f"{act}(up)": act for act in ACTIVATIONS}
        return None, products[0], simple.get(text, text)
    for gate, up in ((0, 1), (1, 0)):
        written = text.replace(f"@{gate}", "gate").replace(f"@{up}", "up")
        for act in ACTIVATIONS:
            if written in (f"mul({act}(gate), up)", f"mul(up, {act}(gate))"):
                return products[gate], products[up], act
    return products[0], products[1], text.replace("@0", "gate").replace("@1", "up")
