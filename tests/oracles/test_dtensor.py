"""Splits that DTensor allows and the rules do not, with reasons; new and stale ones fail."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from autopar.intra_op.rule import rule
from autopar.intra_op.rules import rules
from tests.oracles.dtensor import OURS, Comparison, compare, fake_mesh
from tests.support.versions import BEFORE_2_13

pytestmark = pytest.mark.skipif(
    BEFORE_2_13,
    reason="DTensor's rules are those of the release that constraints.txt pins",
)
RULES = {op: item for op, item in rules().items() if op not in OURS}
# (kind of difference, reason, operators); the kinds are those of `Difference`.
REASONS = (
    (
        "sum",
        "every device would compute the whole product: the sum is settled before it",
        """addmm addmv addr baddbmm bmm einsum inner linear matmul mm mv outer tensordot
        scaled_dot_product_attention""",
    ),
    ("sum", "a weight is owed no sum", "_weight_norm rms_norm"),
    ("sum", "not all results are linear", "_linalg_solve_ex meshgrid.indexing"),
    (
        "sum",
        "a part may be NaN, or zero times infinity, where the sum is not",
        "nansum special_xlog1py",
    ),
    (
        "sum",
        "no value is read; the passes write constants without the tensor that they are like",
        """empty_like fill.Scalar full_like new_empty new_full new_ones new_zeros ones_like zero
        zeros_like cauchy geometric log_normal rand_like randint_like randint_like.low_dtype
        randn_like to.other""",
    ),
    ("sum", "the passes drop what drops nothing", "dropout"),
    (
        "mean",
        "the passes write a mean as a sum and a division",
        """adaptive_avg_pool2d binary_cross_entropy binary_cross_entropy_with_logits
        cross_entropy_loss hinge_embedding_loss huber_loss kl_div l1_loss mean mean.dim mse_loss
        nll_loss_nd smooth_l1_loss soft_margin_loss""",
    ),
    (
        "other",
        "owed a product, a norm or two extrema: no sum, and not exchanged",
        """all all.dim aminmax dist linalg_norm linalg_vector_norm norm.Scalar
        norm.ScalarOpt_dim prod prod.dim_int""",
    ),
    (
        "strided",
        "an inner factor of a merged dimension",
        "channel_shuffle flatten.using_ints repeat_interleave.self_int reshape view",
    ),
    (
        "split",
        "random numbers are drawn alike on every device",
        """alpha_dropout bernoulli cauchy feature_alpha_dropout feature_dropout geometric log_normal
        multinomial native_dropout normal_functional rand_like randint_like randint_like.low_dtype
        randn_like rrelu""",
    ),
    (
        "split",
        "every device holds the same buffer afterwards",
        "batch_norm",
    ),
    (
        "split",
        "only the type is read; the passes write constants and casts without the tensor",
        "new_empty new_full new_ones new_zeros to.other type_as",
    ),
    (
        "split",
        "every device would compute all of q k^T",
        "scaled_dot_product_attention",
    ),
    ("split", "gradients scaled by frequency need all look-ups", "embedding"),
    ("split", "a row of one channel", "pixel_shuffle pixel_unshuffle"),
    ("wrong", "a channel's pixels are not whole channels", "pixel_shuffle pixel_unshuffle"),
    ("wrong", "the sum of truths is a number", "any any.dim any.dims"),
    ("wrong", "sorted numbers only are searched in parts, and they are few", "bucketize.Tensor"),
    ("wrong", "parts are rounded before they are summed", "to.device to.dtype to.dtype_layout"),
    (
        "wrong",
        "DTensor names other dimensions there; the passes write a reshape",
        "squeeze squeeze.dim squeeze.dims",
    ),
    ("wrong", "indices of a part point beyond it, or masks are longer", "gather index_put"),
    ("wrong", "batches of two lengths", "linalg_solve_triangular"),
    ("wrong", "a dimension that is kept is not counted", "logsumexp"),
    ("wrong", "a result spans the parts of all operands", "meshgrid.indexing"),
    ("wrong", "an odd number of halves", "view.dtype"),
)
EXPECTED = {(f"aten.{op}", kind) for kind, _, ops in REASONS for op in ops.split()}
SMOKE = ("aten.linear", "aten.amax", "aten.reshape", "aten.embedding", "aten.mse_loss")
PARTS = 8


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with warnings.catch_warnings(), fake_mesh() as found:
        warnings.simplefilter("ignore")
        yield found


def check(found: Comparison) -> None:
    expected = {kind for op, kind in EXPECTED if op == found.op}
    shown = "\n".join(map(str, found.theirs))
    assert found.kinds == expected, f"{found.op}: expected {expected}, DTensor allows\n{shown}"


@pytest.mark.parametrize("op", SMOKE)
def test_some_rules_beside_dtensor(mesh: DeviceMesh, op: str) -> None:
    found = compare(RULES[op], mesh)
    assert not found.unknown
    assert found.both > 3
    check(found)


def test_what_a_rule_forgets_is_found_by_its_kind(mesh: DeviceMesh) -> None:
    careful = rule("aten.relu", "a! b -> a! b", examples=("f64[4, 6]",))
    found = compare(careful, mesh)
    assert [str(item) for item in found.theirs] == ["split: (f64[4, 6]) S(0) -> S(0)"]
    assert (found.both, found.ours) == (2, 0)
    bold = rule("aten.cumsum", "a b -> a b", examples=("f64[4, 6], 1",))
    assert compare(bold, mesh).ours == 1


def test_reasons_are_given_once() -> None:
    given = [(op, kind) for kind, _, ops in REASONS for op in ops.split()]
    assert len(given) == len(set(given)) == len(EXPECTED)
    assert {op for op, _ in EXPECTED} <= RULES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_dtensor_splits_no_more_without_a_reason(mesh: DeviceMesh, part: int) -> None:
    for op in sorted(RULES)[part::PARTS]:
        check(compare(RULES[op], mesh))
