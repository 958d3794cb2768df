"""Layout notation round trips and refuses what does not fit."""

from __future__ import annotations

import pytest

from autopar.errors import AutoparError, LayoutError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType

MESH = Mesh.parse("cpu: node=2, gpu=4")


@pytest.mark.parametrize(
    "text",
    ["[]", "[8, 1024@gpu, 2048] +sum(node)", "[64@node@gpu] ", "[8, 16] +sum(gpu) -sum(node)",
     "[7] -sum(node, gpu)"],
)  # fmt: skip
def test_layouts_read_back(text: str) -> None:
    shape, layout = Layout.parse(text)
    assert layout.format(shape) == text.strip()


def test_local_shape_and_bytes() -> None:
    shape, layout = Layout.parse("[8, 64@node@gpu, 3]")
    tensor = TensorType("bf16", shape)
    assert layout.local_shape(shape, MESH) == (8, 8, 3)
    assert layout.local_bytes(tensor, MESH) == tensor.nbytes // 8


@pytest.mark.parametrize("text", ["8, 4", "[8@]", "[x]", "[8@gpu, 8@gpu]", "[8] +max(gpu)"])
def test_bad_layout_texts_are_named(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("[6@gpu]", (6,)), ("[8, 8]", (8,)), ("[8@rack]", (8,)), ("[8@node@gpu]", (12,))],
)
def test_layouts_that_do_not_fit_are_named(text: str, shape: tuple[int, ...]) -> None:
    layout = Layout.parse(text)[1]
    with pytest.raises(AutoparError):
        layout.check(shape, MESH)


@pytest.mark.parametrize("text", ["f32", "q8[2]", "f32[a]", "f32[2"])
def test_bad_tensor_types_are_named(text: str) -> None:
    with pytest.raises(LayoutError):
        TensorType.parse(text)
