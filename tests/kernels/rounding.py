"""Makes Triton's interpreter round like a GPU.

By default it truncates f32 to bf16, stores bf16 as integers and calculates with their bits, and
rounds some f32 to the wrong f8. Our kernels calculate in f32 only, so casts are corrected, and
arithmetic in bf16, which would be silently wrong, is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# numpy knows none of these; torch rounds them to nearest even.
NARROW = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}


def install() -> None:
    """Mend the interpreter of this process."""
    assert triton.knobs.runtime.interpret
    cast, binary, splat = (
        InterpreterBuilder.cast_impl,
        InterpreterBuilder.binary_op,
        InterpreterBuilder.create_splat,
    )

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        held, wanted = source.dtype.scalar, target.scalar
        if held == wanted:
            return source
        if held in NARROW:
            dtype, bits = NARROW[held]
            data = torch.from_numpy(np.array(source.data)).view(bits).view(dtype).float().numpy()
            source = TensorHandle(data, tl.float32)
        if wanted in NARROW:
            dtype, bits = NARROW[wanted]
            data = torch.from_numpy(np.array(source.data, dtype=np.float32))
            if dtype is torch.float8_e4m3fn:  # hardware saturates
                data = data.clamp(-448, 448)
            return TensorHandle(data.to(dtype).view(bits).numpy(), wanted)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return cast_impl(self, source, target)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        assert left.dtype.scalar not in NARROW, f"arithmetic of {left.dtype} would be wrong here"
        return binary(self, left, right, op)

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_:  # a comparison of scalars would become an integer
            return TensorHandle(np.full(kind.shape, value.data.reshape(-1)[0]), tl.int1)
        return splat(self, kind, value)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.create_splat = create_splat
