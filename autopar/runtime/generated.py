"""The definitions of a generated program's module; only this file reads them.

A module may be edited by hand. Required definitions are checked when it is loaded, optional ones
get their defaults here, and the rest of the runtime reads typed fields.
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
    "COUNTS": dict,
    "COLLECTIVES": tuple,
}


@dataclass(frozen=True)
class Generated:
    """A loaded program.

    Attributes:
        module: its functions.
        mesh: its devices.
        inputs: name -> dtype and shape of a value of the batch, "i64[8, 16]".
        received: name -> a value that another stage of the pipeline sends.
        outputs: name -> dtype, global shape and layout of a result of `forward`.
        loss: the name of the loss among these; None if there is none.
        parameters: its parameters, in its precision.
        precision: dtypes of compute, updates and gradients in messages.
        bucket: bytes of gradients, or of parameters, in one call.
        host_state: whether optimizer state is in host memory between updates.
        fused_update: whether a kernel runs the step of AdamW.
        aside: whether `forward(..., outputs=False)` skips outputs.
        written: the buffers that `forward` writes, by key.
        counts: input that the runtime adds up over microbatches -> lines of the graph that computes
            one microbatch's part.
        random: whether it draws random numbers.
        collectives: algorithms of collectives that do not name one.
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
    counts: Mapping[str, tuple[str, ...]]
    random: bool
    collectives: ChosenAlgorithms

    @classmethod
    def of(cls, module: ModuleType) -> Generated:
        """Reads the definitions of a module.

        Raises:
            ProgramError: a definition is missing, has the wrong type, or cannot be parsed.
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
                counts=given.get("COUNTS", {}),
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
    def stored(self) -> tuple[Parameter, ...]:
        """Its parameters and buffers except caches."""
        return tuple(parameter for parameter in self.parameters if not parameter.cache)

    @property
    def caches(self) -> tuple[Parameter, ...]:
        """Its caches, if it generates."""
        return tuple(parameter for parameter in self.parameters if parameter.cache)

    @property
    def widened(self) -> dict[torch.dtype, torch.dtype]:
        """Dtypes of activations -> dtypes in which they are summed over devices."""
        pairs = self.precision.widened.items()
        return {TORCH_DTYPES[narrow]: TORCH_DTYPES[wide] for narrow, wide in pairs}

    @property
    def host_bucket(self) -> int | None:
        """Bytes of parameters whose state comes from the host together; None without host state."""
        return self.bucket if self.host_state else None

    @property
    def described(self) -> tuple[object, ...]:
        """Text of everything but its code: layouts, precision and parameters."""
        return self.mesh, self.inputs, self.received, self.outputs, self.parameters, self.precision

    @property
    def stows(self) -> bool:
        """Returns whether activations are offloaded between forward and backward."""
        return "stowed" in self.module.forward.__code__.co_names

    def forward(
        self,
        runtime: Runtime,
        given: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        outputs: bool = True,
    ) -> dict[str, Tensor]:
        """Runs the program on one device.

        Args:
            runtime: the mesh.
            given: this device's shards of parameters and buffers, by key.
            batch: the inputs by name, and the values that a stage receives.
            outputs: whether to compute outputs that cost more than the loss alone.

        Returns:
            This device's shards of the outputs, by name.
        """
        less = {} if outputs or not self.aside else {"outputs": False}
        return dict(self.module.forward(runtime, given, batch, **less))

    def draw(self, runtime: Runtime) -> None:
        """Advances the generators as a forward does."""
        self.module.draw(runtime)


def _constants(module: ModuleType) -> dict[str, Any]:
    """Returns the constants that a program may define; raises ProgramError naming a wrong one."""
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
                f"{name} of the program {module.__file__} has the wrong type",
                why=f"it is {str(here[name])[:200]}, a {type(here[name]).__name__}",
                todo="compare it with a program that autopar emits",
            )
    return {name: here[name] for name in (*_REQUIRED, *_OPTIONAL) if name in here}
