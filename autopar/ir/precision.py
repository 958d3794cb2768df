"""Precision: the dtypes in which a model computes, is updated, and sends its gradients.

Parameters are stored and used in one dtype; the optimizer updates a copy in a wider one, the
master, which has the layout of the parameter's optimizer state (Micikevicius et al., "Mixed
Precision Training", arXiv:1710.03740, section 3.1; ZeRO, arXiv:1910.02054, section 3.1: 2 bytes per
parameter, 2 per gradient, 12 for the master and Adam's moments). Gradients accumulate over
microbatches in the master's dtype, and are sent in that of `communication`.

On request parameters are gathered as int8 blocks (ZeRO++, arXiv:2306.10209; see
`int8_blocks.py`), and gradients are compressed by one of the methods of `compression/`. Training
then differs from that on one device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import PrecisionError
from autopar.ir.compression import Method, method_of
from autopar.ir.tensor import DTYPE_BYTES, TensorType

_FLOATS = {
    "f16": "f16", "fp16": "f16", "float16": "f16", "bf16": "bf16", "bfloat16": "bf16",
    "f32": "f32", "fp32": "f32", "float32": "f32", "f64": "f64", "fp64": "f64", "float64": "f64",
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run; `Precision()`, and f32 throughout, leave the model unchanged.

    Attributes:
        compute: dtype of operators, and of parameters as they are stored and gathered; "" keeps the
            model's. Buffers keep their own dtype.
        master: dtype in which the optimizer updates and gradients accumulate.
        communication: dtype in which gradients of parameters are sent, between replicas and where
            they are partial sums over tensor- or sequence-parallel axes.
        sums: dtype of sums over devices of activations and their gradients in layout changes; ""
            keeps their own.
        weights: "int8" if parameters are gathered as int8 blocks for forward and backward.
        gradients: the method that compresses gradients, "int8" or "top-k 1 %"; "" for none.
        pure: whether losses, too, are computed in a 16-bit `compute`, instead of in f32.

    Raises:
        PrecisionError: a name that is not a floating dtype, a master or sums narrower than
            `compute`, an unknown method, or error feedback together with a scaled loss.
    """

    compute: str = ""
    master: str = "f32"
    communication: str = "f32"
    sums: str = ""
    weights: str = ""
    gradients: str = ""
    pure: bool = False

    def __post_init__(self) -> None:
        for name in ("compute", "master", "communication", "sums"):
            given = getattr(self, name)
            if given not in _FLOATS and not (name in ("compute", "sums") and given == ""):
                raise PrecisionError(
                    f"there is no precision {given!r}",
                    why=f"{name} is one of bf16, fp16, fp32, fp64",
                    todo='pass precision="bf16", "fp16" or "fp32", or an autopar.Precision',
                )
            object.__setattr__(self, name, _FLOATS.get(given, ""))
        if self.compute == self.master == self.communication == "f32":
            object.__setattr__(self, "compute", "")
        if self.weights not in ("", "int8"):
            raise PrecisionError(
                f"weights cannot be sent as {self.weights!r}",
                why="int8 is the only dtype of blocks",
                todo='write "weights=int8", or leave it out',
            )
        method = self.compression
        object.__setattr__(self, "gradients", "" if method is None else str(method))
        if method is not None and method.feedback and self.scaled:
            raise PrecisionError(
                f"gradients cannot be sent as {method} in fp16",
                why="the residual is added to later gradients, which have another loss scale",
                todo='pass precision="bf16", or gradients="int8", which has no residual',
            )
        object.__setattr__(self, "pure", self.pure and DTYPE_BYTES.get(self.compute, 4) == 2)
        if not self.compute or self.sums == self.compute:
            object.__setattr__(self, "sums", "")
        if self.sums and DTYPE_BYTES[self.sums] < DTYPE_BYTES[self.compute]:
            raise PrecisionError(
                f"sums are made in {self.sums}, the model computes in {self.compute}",
                why="a sum in a narrower dtype loses precision of its terms",
                todo="pass sums that are as wide or wider, f32",
            )
        if self.compute and DTYPE_BYTES[self.master] < DTYPE_BYTES[self.compute]:
            raise PrecisionError(
                f"the master is {self.master}, the model computes in {self.compute}",
                why="a narrower master loses updates that are small compared with the weight",
                todo="pass a master that is as wide or wider, f32",
            )

    @classmethod
    def read(cls, given: str | Precision | None) -> Precision:
        """Parses "bf16", "bf16 pure" or "fp16 communication=bf16"; "fp32" changes nothing.

        Raises:
            PrecisionError: the text is not a precision.
        """
        if isinstance(given, Precision):
            return given
        if not given:
            return cls()
        words = str(given).split()
        compute = "" if "=" in words[0] else words.pop(0)
        pure = bool(compute) and words[:1] == ["pure"]
        words = words[pure:]
        starts = [at for at, word in enumerate(words) if not at or "=" in word]
        spans = zip(starts, [*starts[1:], len(words)], strict=False)
        pairs = [" ".join(words[start:end]).partition("=") for start, end in spans]
        known = {"weights", "gradients"} | (
            {"master", "communication", "sums"} if compute else set()
        )
        if any(name not in known or not value for name, _, value in pairs):
            raise PrecisionError(
                f"cannot read the precision {given!r}",
                todo='write "bf16", "fp16", "fp32" or such as "bf16 communication=bf16 sums=f32 '
                'weights=int8 gradients=top-k 1 %"',
            )
        return cls(compute, **{name: value for name, _, value in pairs}, pure=pure)

    def __str__(self) -> str:
        words = [self.compute, "pure" if self.pure else ""]
        words += [f"{n}={v}" for n, v in self._others if v != "f32"]
        words = [*words, f"sums={self.sums}" if self.sums else ""] if self.compute else []
        words += [f"{name}={given}" for name, given in self._quantised if given]
        return " ".join(filter(None, words))

    @property
    def _quantised(self) -> tuple[tuple[str, str], ...]:
        return ("weights", self.weights), ("gradients", self.gradients)

    @property
    def compression(self) -> Method | None:
        """The method that compresses gradients."""
        return method_of(self.gradients) if self.gradients else None

    @property
    def caution(self) -> str:
        """Warns of effects on results beyond rounding in the named dtypes; "" if there are none."""
        rounded = [name for name, given in self._quantised if given == "int8"]
        told = [f"{' and '.join(rounded)} go as int8 blocks"] if rounded else []
        if self.compression is not None and self.compression.feedback:
            told.append(
                f"gradients go as {self.gradients}, and what that leaves out with the next ones,"
            )
        return f"Numerics change: {'; '.join(told)} where that is fewer bytes." if told else ""

    @property
    def _others(self) -> tuple[tuple[str, str], ...]:
        return ("master", self.master), ("communication", self.communication)

    @property
    def widened(self) -> dict[str, str]:
        """Dtype of activations -> the dtype in which their sums over devices are computed."""
        return {self.compute: self.sums} if self.sums else {}

    @property
    def scaled(self) -> bool:
        """Returns whether the loss is scaled, so that small gradients do not vanish in float16."""
        return self.compute == "f16"

    def has_master(self, tensor: TensorType, trained: bool = True) -> bool:
        """Returns whether a parameter of this type has a master copy that the optimizer updates."""
        return trained and tensor.dtype == self.compute != self.master

    def updated(self, tensor: TensorType, trained: bool = True) -> TensorType:
        """Returns the type in which the optimizer sees a parameter and its gradients accumulate."""
        if not self.has_master(tensor, trained):
            return tensor
        return replace(tensor, dtype=self.master)

    def sent(self, tensor: TensorType, trained: bool = True) -> TensorType:
        """Returns the type in which its gradient is sent."""
        if not (trained and tensor.dtype == self.compute):
            return tensor
        return replace(tensor, dtype=self.communication)


AS_IS = Precision()
