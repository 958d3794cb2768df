"""Operators that cut one tensor into several."""

# Operator -> index of its argument `dim`.
SPLITS = {
    "aten.split.Tensor": 2, "aten.split.sizes": 2, "aten.split_with_sizes": 2, "aten.chunk": 2,
    "aten.unsafe_split.Tensor": 2, "aten.unsafe_split_with_sizes": 2, "aten.unsafe_chunk": 2,
    "aten.tensor_split.sections": 2, "aten.tensor_split.indices": 2,
}  # fmt: skip
