"""Muon: momentum of a matrix, orthogonalised by Newton-Schulz; other parameters by AdamW.

The algorithm is that of `torch.optim.Muon` (K. Jordan, "Muon: An optimizer for hidden layers in
neural networks", 2024), whose options and defaults it has:

    m = momentum m + (1 - momentum) g;     d = momentum m + (1 - momentum) g  (Nesterov), or m
    X = d / |d|;  five times: A = X X^T, X = a X + (b A + c A A) X
    p = (1 - lr weight_decay) p - lr max(1, rows / columns)^(1/2) X

Momentum stays split as the parameter is. Of every matrix one rank, its owner, receives the whole
direction d, and sends X back, in the dtype of the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from autopar.errors import OptionError
from autopar.ir.update import ADAMW, Products, Rule, State
from autopar.ir.update.update_rules import DEALT

if TYPE_CHECKING:
    from autopar.runtime.update.owners import OwnedWeight, Owners

NAME = "muon"
MUON: dict[str, Any] = {
    "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5,
    "adjust_lr_fn": None,
}  # fmt: skip
_ALGORITHMS, _DTYPES = ("muon", "adamw"), ("bf16", "own")
_TERMS = ("s s l", "s s s", "s l s")  # X X^T, A A and A X


class MuonKeywords(TypedDict, total=False):
    """Options of the update of matrices, as of `torch.optim.Muon`."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None


@dataclass(frozen=True)
class MuonFactory:
    """Creates `Muon` of parameters; made by `muon`.

    Attributes:
        matrices: options of matrices.
        others: options of AdamW for other parameters.
        adamw_names: patterns of names of matrices that AdamW updates.
    """

    matrices: Mapping[str, Any]
    others: Mapping[str, Any]
    adamw_names: tuple[str, ...] = ()
    __name__: str = field(default=NAME, repr=False)

    def __call__(self, parameters: Any) -> Muon:
        """Returns the optimizer of parameters, or of groups of them with options."""
        rows = list(parameters)
        if rows and not isinstance(rows[0], dict):
            matrices = [p for p in rows if p.ndim == 2]
            others = [p for p in rows if p.ndim != 2]
            rows = [
                {"params": members, "algorithm": name}
                for name, members in zip(_ALGORITHMS, (matrices, others), strict=True)
                if members
            ]
        return Muon([self._group(row) for row in rows])

    def roles(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """Returns the algorithm of each trained parameter of a model, by its name.

        Matrices are updated by Muon, unless they are embeddings or match `adamw_names`.
        """
        tables = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        }

        def algorithm(name: str, parameter: nn.Parameter) -> str:
            named = any(fnmatchcase(name, pattern) for pattern in self.adamw_names)
            matrix = parameter.ndim == 2 and id(parameter) not in tables and not named
            return _ALGORITHMS[not matrix]

        return {
            name: {"algorithm": algorithm(name, parameter)}
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def _group(self, row: Mapping[str, Any]) -> dict[str, Any]:
        algorithm = row.get("algorithm", "muon")
        options = self.matrices if algorithm == "muon" else self.others
        return {**options, **row, "algorithm": algorithm}


def muon(
    *,
    adamw: Mapping[str, Any] | None = None,
    adamw_names: tuple[str, ...] | list[str] = (),
    dtype: str = "bf16",
    **options: Unpack[MuonKeywords],
) -> MuonFactory:
    """Returns Muon for `compile`: `compile(..., optimizer=autopar.muon(lr=0.02))`.

    Matrices are updated by Muon; embeddings and parameters of other than two dimensions by AdamW.
    A head that shares no weight with an embedding is a matrix; name it to leave it to AdamW.

    Args:
        adamw: options of `torch.optim.AdamW` for its parameters, such as {"lr": 3e-4}.
        adamw_names: patterns of names of matrices that AdamW also updates, ("lm_head.weight",).
        dtype: of the Newton-Schulz iteration: "bf16", or "own" for that of the parameter.
        **options: options of `torch.optim.Muon`, with its defaults.

    Raises:
        OptionError: there is no such option or dtype.
    """
    unknown = [name for name in options if name not in MUON]
    if unknown or dtype not in _DTYPES:
        raise OptionError(
            f"muon does not take {unknown[0] if unknown else f'dtype={dtype!r}'}",
            why=f"its options are {', '.join(MUON)}, and its dtypes {', '.join(_DTYPES)}",
        )
    return MuonFactory({**MUON, "dtype": dtype, **options}, dict(adamw or {}), tuple(adamw_names))


class Muon(Optimizer):
    """Muon and AdamW, by the option `algorithm` of a group: "muon" or "adamw".

    Args:
        groups: parameters with their options.

    Attributes:
        owners: the owned parameters; () if this process has whole parameters only.

    Raises:
        ValueError: a parameter in a group of "muon" is not a matrix, or there is no such algorithm.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            if group.setdefault("algorithm", "muon") not in _ALGORITHMS:
                raise ValueError(f"the algorithm is muon or adamw, not {group['algorithm']!r}")
            if group["algorithm"] == "adamw":
                group |= {k: group.get(k, v) for k, v in AdamW([torch.zeros(1)]).defaults.items()}
            else:
                group |= {k: group.get(k, v) for k, v in {**MUON, "dtype": "bf16"}.items()}
                for parameter in group["params"]:
                    if parameter.ndim != 2:
                        raise ValueError(f"muon takes matrices, not {list(parameter.shape)}")
        super().__init__(groups, {})
        self.owners: tuple[Owners, ...] = ()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; closures are not supported."""
        others = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        if any(parameter.grad is not None for group in others for parameter in group["params"]):
            inner = AdamW([torch.zeros(1)])
            inner.param_groups, inner.state = others, self.state
            inner.step()
        group_of = {
            id(parameter): group
            for group in self.param_groups
            if group["algorithm"] == "muon"
            for parameter in group["params"]
            if parameter.grad is not None
        }
        dealt: set[int] = set()
        for owners in self.owners:
            items = [item for key, item in owners.items.items() if key in group_of]
            self._by_owners(owners, items, group_of)
            dealt |= {id(item.weight.updated) for item in items}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in group_of and id(parameter) not in dealt:
                    direction = self._direction(parameter, group)
                    self._apply(parameter, orthogonal(direction, group), parameter.shape, group)

    def _by_owners(
        self, owners: Owners, items: list[OwnedWeight], group_of: Mapping[int, dict[str, Any]]
    ) -> None:
        """Updates matrices of which one rank each orthogonalises the direction."""

        def group(item: OwnedWeight) -> dict[str, Any]:
            return group_of[id(item.weight.updated)]

        def given(item: OwnedWeight) -> list[Tensor]:
            direction = self._direction(item.weight.updated, group(item))
            return [direction.bfloat16() if group(item)["dtype"] == "bf16" else direction]

        owners.run(
            items,
            given,
            lambda item, wholes: orthogonal(wholes[0], group(item)),
            lambda item, part: self._apply(item.weight.updated, part, item.shape, group(item)),
        )

    def _direction(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Updates the momentum of this rank's part; returns the matrix to orthogonalise."""
        state, momentum, gradient = self.state[parameter], group["momentum"], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()

    def _apply(
        self,
        parameter: Tensor,
        direction: Tensor,
        shape: tuple[int, ...],
        group: Mapping[str, Any],
    ) -> None:
        """Moves this rank's part of a parameter of the given whole shape."""
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(direction, alpha=-rate * _factor(group["adjust_lr_fn"], *shape))


def orthogonal(direction: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns the matrix with the singular vectors of a direction, and singular values near 1.

    By the quintic Newton-Schulz iteration, in the dtype that a group says.

    Args:
        direction: [rows, columns].
        group: options of `Muon`.
    """
    a, b, c = group["ns_coefficients"]
    x = direction.bfloat16() if group["dtype"] == "bf16" else direction
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _factor(adjust: str | None, rows: int, columns: int) -> float:
    """Returns the factor of a matrix's learning rate; see `torch.optim.Muon`."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if adjust in (None, "original") else 1.0


def rules(optimizer: Optimizer) -> tuple[Rule, ...] | None:
    """Returns the rules of the first group of Muon with parameters, this module's or torch's."""
    group = next(group for group in optimizer.param_groups if group["params"])
    if type(optimizer) is torch.optim.Muon:
        return (_rule({**group, "dtype": "bf16"}),)
    if type(optimizer) is not Muon:
        return None
    if group["algorithm"] == "adamw":
        states = ADAMW.rules[0].states
        more = (State("max_exp_avg_sq"),) if group["amsgrad"] else ()
        return (Rule((*states, *more)),)
    return (_rule(group), Rule(ADAMW.rules[0].states))


def _rule(group: Mapping[str, Any]) -> Rule:
    dtype = "bf16" if group["dtype"] == "bf16" else ""
    products = Products(group["ns_steps"], _TERMS, dtype)
    return Rule((State("momentum_buffer"),), "a b", needs=DEALT, products=products)


def instead(optimizer: Optimizer) -> Optimizer | None:
    """Returns this module's Muon in place of torch's."""
    if type(optimizer) is not torch.optim.Muon:
        return None
    return Muon([dict(group) for group in optimizer.param_groups])
