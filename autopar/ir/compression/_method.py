"""The two kinds of compression: messages that every device decodes, and factors that are summed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from autopar.ir.tensor import DTYPE_BYTES

Tensor = Any  # a torch.Tensor; see the package
Reduction = Generator[Tensor, Tensor, tuple[Tensor, Tensor]]


class Field(NamedTuple):
    """A part of a message: numbers of a dtype, "" for the dtype in which gradients are sent."""

    dtype: str
    length: int


@dataclass(frozen=True)
class Messages(ABC):
    """A method that encodes n numbers as a message of fixed size.

    An all_reduce becomes an all_gather of messages. If this would receive more bytes than the exact
    call, it becomes an all_to_all of messages and an all_gather of the encoded sums. A
    reduce_scatter becomes an all_to_all. Each device sums the decoded messages in rank order.
    """

    feedback: ClassVar[bool] = True  # whether the residual is added to the next gradient

    @abstractmethod
    def fields(self, n: int) -> tuple[Field, ...]:
        """Returns the parts of a message of n numbers."""

    @abstractmethod
    def encode(self, x: Tensor, kernels: Any) -> tuple[Tensor, ...]:
        """Returns a tensor [rows, length] for each field, for the rows of x, [rows, n].

        Args:
            x: f32 or f64.
            kernels: the operators of `autopar_kernels`.
        """

    @abstractmethod
    def decode(self, fields: Sequence[Tensor], n: int, kernels: Any) -> Tensor:
        """Returns [rows, n], given the result of `encode`."""

    def total(self, fields: Sequence[Tensor], n: int, kernels: Any) -> Tensor:
        """Returns [n], the sum of the decoded rows in order."""
        return self.decode(fields, n, kernels).sum(0)

    def nbytes(self, n: int, element: int) -> int:
        """Returns the bytes of a message of n numbers.

        Args:
            n: count of numbers.
            element: bytes of a number that is sent without compression.
        """
        sizes = ((DTYPE_BYTES[field.dtype] if field.dtype else element) for field in self.fields(n))
        return sum(size * field.length for size, field in zip(sizes, self.fields(n), strict=True))


@dataclass(frozen=True)
class Factors(ABC):
    """A method that sends a matrix as factors, each of which one all_reduce sums."""

    feedback: ClassVar[bool] = True

    @abstractmethod
    def sizes(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the number of elements of each all_reduce, in order."""

    @abstractmethod
    def reduce(self, x: Tensor, memory: dict[str, Tensor]) -> Reduction:
        """Yields tensors to sum over devices; a generator that is sent each sum.

        Args:
            x: this device's matrix.
            memory: tensors that the method keeps from step to step, by name.

        Returns:
            The approximate sum of all matrices, and this device's contribution to it.
        """


Method = Messages | Factors


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a tensor taken as a matrix."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
