"""A generated program as the runtime sees it: the one place that reads what its module defines.

A module may be edited by hand. What it must define is checked when it is loaded, what it may leave
out has its default here, and everything else of the runtime reads typed fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ProgramError
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.tensor import Layout
from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime.parameters.pieces import Parameter
from autopar.runtime.runtime import Received, Runtime, typed

_REQUIRED: Mapping[str, type | tuple[type, ...]] = {
    "MESH": str,
    "INPUTS": dict,
    "OUTPUTS": dict,
    "LOSS": (str, type(None)),
    "RANDOM": bool,
}
_OPTIONAL: Mapping[str, type] = {
    "RECEIVED": dict,
    "PRECISION": str,
    "BUCKET": int,
    "HOST_STATE": bool,
    "FUSED_UPDATE": bool,
    "ASIDE": bool,
    "WRITTEN": tuple,
    "COLLECTIVES": tuple,
}


@dataclass(frozen=True)
class Generated:
    """A loaded program.

    Attributes:
        module: its functions.
        mesh: the devices that it is for.
        inputs: name -> dtype and shape of a value of the batch, "i64[8, 16]".
        received: name -> a value that a stage of a pipeline has from another stage.
        outputs: name -> dtype, global shape and layout of what `forward` returns.
        loss: the name of the loss among these; None without one.
        parameters: what it stores, in its precision.
        precision: the dtypes in which it computes, is updated and sends gradients.
        bucket: bytes of gradients, or of parameters, that go together.
        host_state: whether optimizer state lies in host memory between updates.
        fused_update: whether AdamW's step is a kernel.
        aside: whether `forward(..., outputs=False)` leaves outputs out.
        written: the buffers that `forward` writes, by key.
        random: whether it draws random numbers.
        collectives: the algorithms that run collectives which name none.
    """

    module: ModuleType
    mesh: Mesh
    inputs: Mapping[str, str]
    received: Mapping[str, Received]
    outputs: Mapping[str, tuple[str, tuple[int, ...], Layout]]
    loss: str | None
    parameters: tuple[Parameter, ...]
    precision: Precision
    bucket: int
    host_state: bool
    fused_update: bool
    aside: bool
    written: tuple[str, ...]
    random: bool
    collectives: ChosenAlgorithms

    @classmethod
    def of(cls, module: ModuleType) -> Generated:
        """Read what a module defines.

        Raises:
            ProgramError: it lacks something, or something has another type or cannot be read.
        """
        given = _constants(module)
        try:
            precision = Precision.read(given.get("PRECISION", ""))
            parameters = tuple(replace(p, precision=precision) for p in module.parameters())
            return cls(
                module=module,
                mesh=Mesh.parse(given["MESH"]),
                inputs=given["INPUTS"],
                received=given.get("RECEIVED", {}),
                outputs={name: typed(text) for name, text in given["OUTPUTS"].items()},
                loss=given["LOSS"],
                parameters=parameters,
                precision=precision,
                bucket=given.get("BUCKET", 1),
                host_state=given.get("HOST_STATE", False),
                fused_update=given.get("FUSED_UPDATE", False),
                aside=given.get("ASIDE", False),
                written=given.get("WRITTEN", ()),
                random=given["RANDOM"],
                collectives=ChosenAlgorithms.parse(given.get("COLLECTIVES", ())),
            )
        except (AttributeError, TypeError) as error:
            raise ProgramError(
                f"the tables of the program {module.__file__} cannot be read",
                why=f"{type(error).__name__}: {error}",
                todo="compare it with a program that autopar emits",
            ) from error

    @property
    def widened(self) -> dict[torch.dtype, torch.dtype]:
        """Dtypes of activations, and those in which they are summed over devices."""
        pairs = self.precision.widened.items()
        return {TORCH_DTYPES[narrow]: TORCH_DTYPES[wide] for narrow, wide in pairs}

    @property
    def host_bucket(self) -> int | None:
        """Bytes of parameters whose state comes from the host together; None if none does."""
        return self.bucket if self.host_state else None

    @property
    def described(self) -> tuple[object, ...]:
        """What a program does, as far as it is not its code: layouts, precision, its parameters."""
        return self.mesh, self.inputs, self.received, self.outputs, self.parameters, self.precision

    @property
    def stows(self) -> bool:
        """Whether activations lie in host memory between forward and backward."""
        return "stowed" in self.module.forward.__code__.co_names

    def forward(
        self,
        runtime: Runtime,
        given: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        outputs: bool = True,
    ) -> dict[str, Tensor]:
        """Run the program on one device.

        Args:
            runtime: the mesh.
            given: parameters and buffers by key, this device's part of each.
            batch: the inputs by name, and what a stage receives.
            outputs: whether outputs are asked for that cost more than the loss alone.

        Returns:
            The outputs by name, this device's part of each.
        """
        less = {} if outputs or not self.aside else {"outputs": False}
        return dict(self.module.forward(runtime, given, batch, **less))

    def draw(self, runtime: Runtime) -> None:
        """Draw the random numbers of a forward, and forget them."""
        self.module.draw(runtime)


def _constants(module: ModuleType) -> dict[str, Any]:
    """The constants of a module that a program may define; ProgramError names a wrong one."""
    here = vars(module)
    functions = ["parameters", "forward"]
    missing = [name for name in (*_REQUIRED, *functions) if name not in here]
    if missing:
        raise ProgramError(
            f"the program {module.__file__} does not define {', '.join(missing)}",
            todo="compare it with a program that autopar emits",
        )
    for name, kind in {**_REQUIRED, **_OPTIONAL}.items():
        if name in here and not isinstance(here[name], kind):
            raise ProgramError(
                f"{name} of the program {module.__file__} is of a wrong type",
                why=f"it is {str(here[name])[:200]}, a {type(here[name]).__name__}",
                todo="compare it with a program that autopar emits",
            )
    return {name: here[name] for name in (*_REQUIRED, *_OPTIONAL) if name in here}
