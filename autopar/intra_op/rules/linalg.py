"""Linear algebra: leading dimensions are a batch and can be split; matrices stay whole."""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import all_whole, argument, broadcast, dimensions, letters, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType

Types = tuple[TensorType, ...]


def _matrices(*cores: int) -> Callable[[Node, Types], str]:
    """Returns a rule whose operands end in `cores` dimensions that cannot be split.

    The last of `cores` holds for further operands. Each result begins with the batch.
    """

    def spec(node: Node, types: Types) -> str:
        ends = (*cores, *cores[-1:] * len(types))
        leads = [t.shape[: len(t.shape) - core] for t, core in zip(types, ends, strict=False)]
        lead = leads[0]
        if any(other != lead for other in leads):
            return all_whole(node, types)
        names = letters(len(lead))
        terms = [
            " ".join([*names, *(f"t{k}_{i}!" for i in range(len(tensor.shape) - len(lead)))])
            for k, tensor in enumerate((*types, *node.types))
        ]
        return f"{', '.join(terms[: len(types)])} -> {', '.join(terms[len(types) :])}"

    return spec


def _along(
    position: int, mark: str, *, gone: bool, default: int = -1
) -> Callable[[Node, Types], str]:
    """Returns a rule for two operands that share one dimension and broadcast otherwise.

    Args:
        position: index of the argument that names the dimension.
        mark: "!" if that dimension stays whole.
        gone: whether the result lacks it.
        default: the dimension of a call that names none.
    """

    def spec(node: Node, types: Types) -> str:
        rank = max(len(tensor.shape) for tensor in types)
        (dim,) = dimensions(argument(node, position, "dim", default), rank)
        names = [f"{n}{mark}" if i == dim else n for i, n in enumerate(letters(rank))]
        out = [n for i, n in enumerate(names) if i != dim or not gone]
        left = ", ".join(broadcast(names, tensor) for tensor in types)
        return f"{left} -> {' '.join(out)}"

    return spec


_SQUARE, _PAIR = "f64[6, 2, 2]", "f64[6, 2, 2], f64[6, 2, 2]"
_MATRICES = {
    "linalg_det": _SQUARE,
    "linalg_slogdet": _SQUARE,
    "logdet": _SQUARE,
    "linalg_inv": _SQUARE,
    "linalg_inv_ex": _SQUARE,
    "inverse": _SQUARE,
    "linalg_qr": "f64[4, 4, 2]",
    "linalg_svdvals": _SQUARE,
    "linalg_matrix_power": f"{_SQUARE}, 3",
    "matrix_exp": _SQUARE,
    "linalg_matrix_exp": _SQUARE,
    "linalg_solve": _PAIR,
    "_linalg_solve_ex": _PAIR,
    "cholesky_inverse": _SQUARE,
    "cholesky_solve": _PAIR,
    "triangular_solve": _PAIR,
    "linalg_solve_triangular": f"{_PAIR}, upper=True",
    "linalg_lu": _SQUARE,
    "trace": "f64[6, 6]",
}
# Inputs that random matrices do not satisfy (symmetric, positive), or results that are not unique.
_NO_GRADIENT = {
    "linalg_svd": f"const {_SQUARE}",
    "linalg_eigh": f"const {_SQUARE}",
    "linalg_eigvalsh": f"const {_SQUARE}",
    "linalg_cholesky": "f64[6, 1, 1]>0",
    "cholesky": "f64[6, 1, 1]>0",
    "linalg_eig": f"const {_SQUARE}",
    "geqrf": f"const {_SQUARE}",
    "linalg_lu_factor_ex": _SQUARE,
    "linalg_ldl_factor_ex": f"const {_SQUARE}",
    "linalg_cholesky_ex": f"const {_SQUARE}",
    "linalg_pinv.atol_rtol_tensor": f"const {_SQUARE}",
    "pinverse": f"const {_SQUARE}",
}
_REFLECTORS = {
    "linalg_householder_product": "f64[6, 2, 2], f64[6, 2]",
    "ormqr": "f64[6, 2, 2], f64[6, 2], f64[6, 2, 2]",
}
# Operands that a matrix, or its inverse, is applied to.
_RIGHT_SIDES = {
    "linalg_solve": ((1,),),
    "linalg_solve_triangular": ((1,),),
    "cholesky_solve": ((0,),),
    "ormqr": ((2,),),
}
RULES = (
    *(
        rule(
            f"aten.{op}",
            _matrices(2),
            flops="6 out",
            linear=_RIGHT_SIDES.get(op, False),
            examples=(example,),
        )
        for op, example in (_MATRICES | _NO_GRADIENT).items()
    ),
    *(
        rule(
            f"aten.{op}",
            _matrices(2, 1, 2),
            flops="6 out",
            linear=_RIGHT_SIDES.get(op, False),
            examples=(example,),
        )
        for op, example in _REFLECTORS.items()
    ),
    rule("aten.cdist", "... m k!, ... n k! -> ... m n", examples=("f64[4, 6, 2], f64[4, 8, 2]",)),
    rule(
        "aten.linalg_cross",
        _along(2, "!", gone=False),
        linear=((0,), (1,)),
        examples=("f64[4, 6, 3], f64[4, 1, 3]", "f64[3, 6], f64[3, 6], dim=0"),
    ),
    rule(
        "aten.linalg_vecdot",
        _along(2, "", gone=True),
        linear=((0,), (1,)),
        examples=("f64[4, 6, 8], f64[4, 1, 8]", "f64[4, 6], f64[4, 6], dim=0"),
    ),
    rule(
        "aten.cosine_similarity",
        _along(2, "!", gone=True, default=1),
        examples=("f64[4, 6, 8], f64[4, 1, 8], -1", "f64[4, 6, 8], f64[4, 6, 8]"),
    ),
)
