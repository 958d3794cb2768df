"""Update: the states that an optimizer keeps of a parameter, and the layout that its kernel needs.

An update is a list of rules; the first rule that applies to a parameter counts:

    * -> step f32[] on host, exp_avg[*], exp_avg_sq[*]
    a b whole -> step f32[] on host, row_var[a 1], col_var[1 b]
    a b dealt, 5 (s s l + s s s + s l s) bf16 -> momentum_buffer[*]
    wte.weight, wpe.weight: * -> step f32[] on host, exp_avg[*], exp_avg_sq[*]

Left of the arrow are the names to which a rule applies (all, if there is none), the dimensions of
the parameter by letters ("*" for any), and the requirement of its kernel:

    nothing  any part of a parameter is updated by itself
    whole    one owner updates the whole parameter and keeps its states, if the parameter is split;
             it receives gradient and parameter, and sends the parameter
    dealt    states are split as the parameter is; of every parameter one owner receives a whole
             direction, works on it, and sends the result, though replicas could do so by themselves

and the matrix products in one update of a matrix, whose short side is `s` and long side `l`. Right
of the arrow are the states: name, dtype if it differs from that of the update, extents, and place
if it is not the device. "[*]" is like the parameter, "[0.5 *]" has half its elements, "[]" is one
number, "[a 1]" has one element per row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from autopar.errors import PlanError, ProgramError
from autopar.ir.tensor import DTYPE_BYTES, TensorType

ANY, PARTS, WHOLE, DEALT = "*", "", "whole", "dealt"
AVERAGE = "average"  # the state that holds a parameter's average
OUTER = "outer_"  # begins the names of states that only the rounds of local updates read
_LETTERS = "abcdefgh"
_STATE = re.compile(r"([^\s\[\],;:]+)(?: (\w+))?\[([^\]]*)\]( on host)?( in the update)?")
_SHARE = re.compile(r"(?:(\d[\d.e+-]*) )?\*")
_PRODUCTS = re.compile(r"(\d{1,4}) \(([sl +]+)\) (\w+)")


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps of a parameter.

    Attributes:
        name: as in the optimizer's state.
        dtype: as in `DTYPE_BYTES`; "" for the dtype of the updated tensor.
        extents: as in the brackets of its text.
        place: "device" or "host".
        lifetime: "kept" between steps, or only in the "update".
    """

    name: str
    dtype: str = ""
    extents: str = ANY
    place: str = "device"
    lifetime: str = "kept"

    @property
    def in_steps(self) -> bool:
        """Returns whether the update of every step reads and writes it."""
        return not self.name.startswith(OUTER)

    def __str__(self) -> str:
        dtype = f" {self.dtype}" if self.dtype else ""
        where = " on host" * (self.place == "host") + " in the update" * (self.lifetime != "kept")
        return f"{self.name}{dtype}[{self.extents}]{where}"

    @classmethod
    def parse(cls, text: str) -> State:
        """Parses the result of `str`; raises PlanError for anything else."""
        match = _STATE.fullmatch(text)
        if match is None or not _extents(match[3]) or match[2] not in (None, *DTYPE_BYTES):
            raise _unread(text, "a name, perhaps a dtype, and extents: exp_avg[*]")
        place, lifetime = "host" if match[4] else "device", "update" if match[5] else "kept"
        return cls(match[1], match[2] or "", match[3], place, lifetime)

    @property
    def like(self) -> bool:
        """Returns whether it has an element for every element of the parameter."""
        return self.extents == ANY

    def nbytes(self, tensor: TensorType) -> float:
        """Returns its bytes for a tensor of this shape, updated in this dtype."""
        share = _SHARE.fullmatch(self.extents)
        if share:
            elements = tensor.numel * float(share[1] or 1)
        else:
            sizes = dict(zip(_LETTERS, tensor.shape, strict=False))
            elements = math.prod(
                int(word) if word.isdigit() else sizes.get(word, 1) for word in self.extents.split()
            )
        return elements * DTYPE_BYTES[self.dtype or tensor.dtype]


def _extents(text: str) -> bool:
    words = re.fullmatch(r"(?:[a-h]|\d{1,12})(?: (?:[a-h]|\d{1,12}))*", text)
    return bool(not text or words or _SHARE.fullmatch(text))


@dataclass(frozen=True)
class Products:
    """Products of matrices in the update of one matrix.

    Attributes:
        times: number of repetitions.
        terms: letters m, n and k of every product, s for the short and l for the long side.
        dtype: dtype of the operands; "" for the dtype of the updated tensor.
    """

    times: int
    terms: tuple[str, ...]
    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{self.times} ({' + '.join(self.terms)}) {self.dtype or 'own'}"

    @classmethod
    def parse(cls, text: str) -> Products:
        """Parses the result of `str`; raises PlanError for anything else."""
        match = _PRODUCTS.fullmatch(text)
        terms = tuple(match[2].split(" + ")) if match else ()
        fits = all(re.fullmatch("[sl] [sl] [sl]", term) for term in terms)
        if match is None or not fits or match[3] not in ("own", *DTYPE_BYTES):
            raise _unread(text, "repetitions, products and a dtype: 5 (s s l + s s s) bf16")
        return cls(int(match[1]), terms, "" if match[3] == "own" else match[3])

    def sizes(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Returns m, n and k of every product for a matrix of this shape."""
        of = {"s": min(shape), "l": max(shape)}
        rows = [term.split() for term in self.terms] * self.times
        return [(of[m], of[n], of[k]) for m, n, k in rows]


@dataclass(frozen=True)
class Rule:
    """Update of parameters of one kind; see the module.

    Attributes:
        states: states of each.
        dims: letters of their dimensions, or "*".
        names: patterns of their names; () for all.
        needs: PARTS, WHOLE or DEALT.
        products: products of matrices in an update, None without.
    """

    states: tuple[State, ...] = ()
    dims: str = ANY
    names: tuple[str, ...] = ()
    needs: str = PARTS
    products: Products | None = None

    def __str__(self) -> str:
        names = f"{', '.join(self.names)}: " if self.names else ""
        needs = f" {self.needs}" if self.needs else ""
        products = f", {self.products}" if self.products else ""
        states = ", ".join(map(str, self.states)) or "nothing"
        return f"{names}{self.dims or 'scalar'}{needs}{products} -> {states}"

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parses the result of `str`; raises PlanError for anything else."""
        left, arrow, right = text.partition(" -> ")
        names, colon, kind = left.rpartition(": ")
        kind, _, products = (kind if colon else left).partition(", ")
        words = kind.split()
        needs = words.pop() if words and words[-1] in (WHOLE, DEALT) else PARTS
        dims = " ".join(words)
        if not arrow or dims not in (ANY, "scalar", *(dims_of(n) for n in range(1, 9))):
            raise _unread(text, "a kind of parameters and their states: * -> exp_avg[*]")
        states = () if right == "nothing" else right.split(", ")
        return cls(
            tuple(map(State.parse, states)),
            "" if dims == "scalar" else dims,
            tuple(names.split(", ")) if colon else (),
            needs,
            Products.parse(products) if products else None,
        )

    def applies(self, name: str, ndim: int) -> bool:
        """Returns whether it applies to a parameter of this name with `ndim` dimensions."""
        named = not self.names or any(_matches(name, each) for each in self.names)
        return named and self.dims in (ANY, dims_of(ndim))

    def nbytes(self, tensor: TensorType) -> float:
        """Returns the bytes of states between steps on a device that has all of a tensor."""
        states = (s for s in self.states if (s.place, s.lifetime) == ("device", "kept"))
        return math.fsum(state.nbytes(tensor) for state in states)

    @property
    def keeps_whole(self) -> bool:
        """Returns whether the owner of a split parameter keeps its states whole."""
        return self.needs == WHOLE

    def load(self, shape: Sequence[int]) -> float:
        """Returns the load of a parameter's owner, by which parameters are distributed.

        It is the number of FLOPs of the products, or else the size of the states.
        """
        if self.products is None:
            return self.nbytes(TensorType("f32", tuple(shape))) or float(math.prod(shape))
        return float(sum(2 * m * n * k for m, n, k in self.products.sizes(shape)))


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def dims_of(ndim: int) -> str:
    """Returns the letters of `ndim` dimensions, such as "a b" for two."""
    return " ".join(_LETTERS[:ndim])


@dataclass(frozen=True)
class Update:
    """The update of all parameters: rules, of which the first that applies counts.

    Attributes:
        rules: see the module.
        optimizer: name of the optimizer, for messages; no part of the value.
    """

    rules: tuple[Rule, ...]
    optimizer: str = "the optimizer"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Update) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def __str__(self) -> str:
        return "; ".join(self.texts)

    @property
    def texts(self) -> list[str]:
        """Returns its rules as text, one each."""
        return list(map(str, self.rules))

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Update:
        """Parses the result of `texts`; raises PlanError for anything else."""
        return cls(tuple(map(Rule.parse, texts)))

    @classmethod
    def of_bytes(cls, state_bytes: float, whole: bool = False) -> Update:
        """Returns an update with a number of bytes of state per byte of a parameter.

        Args:
            state_bytes: the value in plan files of earlier versions.
            whole: whether the optimizer mixed the elements of a tensor.
        """
        if state_bytes == 2.0 and not whole:
            return ADAMW
        states = [State(f"state_{number + 1}") for number in range(int(state_bytes))]
        if rest := state_bytes - int(state_bytes):
            states.append(State("rest", extents=f"{rest!r} *"))
        return cls((Rule(tuple(states), needs=WHOLE if whole else PARTS),))

    @cached_property
    def mixes(self) -> bool:
        """Returns whether some parameters are updated as a whole, not each element by itself."""
        return any(rule.needs for rule in self.rules)

    @property
    def averages(self) -> bool:
        """Returns whether an average of every parameter is kept."""
        return any(state.name == AVERAGE for rule in self.rules for state in rule.states)

    def rule(self, name: str, shape: Sequence[int]) -> Rule:
        """Returns the rule of a parameter.

        Raises:
            ProgramError: there is none, since the optimizer does not take such a parameter.
        """
        for rule in self.rules:
            if rule.applies(name, len(shape)):
                return rule
        raise ProgramError(
            f"{self.optimizer} cannot train {name}",
            why=f"it takes no parameter of {len(shape)} dimensions; its shape is {list(shape)}",
            todo="use an optimizer that does (autopar.muon trains those by AdamW), or freeze it",
        )

    def with_state(self, state: State) -> Update:
        """Returns the update that keeps a further state of every parameter."""
        rules = tuple(replace(rule, states=(*rule.states, state)) for rule in self.rules)
        return replace(self, rules=rules)

    def with_average(self) -> Update:
        """Returns the update that also keeps an average of every parameter."""
        return self.with_state(State(AVERAGE))


def _unread(text: str, expected: str) -> PlanError:
    return PlanError(f"cannot read {text[:80]!r} of an update", why=f"expected {expected}")


_MOMENTS = (State("step", "f32", "", "host"), State("exp_avg"), State("exp_avg_sq"))
ADAMW = Update((Rule(_MOMENTS),), "AdamW")
NO_STATES = Update((Rule(),), "SGD")
