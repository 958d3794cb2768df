"""autopar compiles a PyTorch model and a device mesh into a program that trains it in parallel.

Names are imported when they are first used, so that `import autopar` takes no time.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar import callbacks, outer, pins
    from autopar.compile import compile, compile_together, emit, load, plan, plan_together
    from autopar.generation_plan import GenerationPlan
    from autopar.intra_op.pins.named_dims import layout
    from autopar.intra_op.rule import OpRule, rule
    from autopar.ir.mesh import Mesh
    from autopar.ir.precision import Precision
    from autopar.operators.model_calls.mixture_call import mixture
    from autopar.operators.model_calls.shard_call import shard
    from autopar.plan import Plan
    from autopar.runtime.checkpoint.plain import load_checkpoint
    from autopar.runtime.optimizers.muon import muon
    from autopar.runtime.ranks.dumps import Dump
    from autopar.runtime.update.groups import groups
    from autopar.session.compiled import Compiled
    from autopar.session.padding import Padding
    from autopar.session.session import Session

__all__ = [
    "Compiled",
    "Dump",
    "GenerationPlan",
    "Mesh",
    "OpRule",
    "Padding",
    "Plan",
    "Precision",
    "Session",
    "callbacks",
    "compile",
    "compile_together",
    "emit",
    "groups",
    "layout",
    "load",
    "load_checkpoint",
    "mixture",
    "muon",
    "outer",
    "pins",
    "plan",
    "plan_together",
    "rule",
    "shard",
]

_HOMES = {
    "Compiled": "session.compiled",
    "Dump": "runtime.ranks.dumps",
    "GenerationPlan": "generation_plan",
    "Mesh": "ir.mesh",
    "OpRule": "intra_op.rule",
    "Padding": "session.padding",
    "Plan": "plan",
    "Precision": "ir.precision",
    "Session": "session.session",
    "compile_together": "compile",
    "emit": "compile",
    "groups": "runtime.update.groups",
    "layout": "intra_op.pins.named_dims",
    "load": "compile",
    "load_checkpoint": "runtime.checkpoint.plain",
    "mixture": "operators.model_calls.mixture_call",
    "muon": "runtime.optimizers.muon",
    "plan_together": "compile",
    "rule": "intra_op.rule",
    "shard": "operators.model_calls.shard_call",
}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "hf", "outer", "pins"):
        return import_module(f"autopar.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"autopar.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Function:
    """A function of compile.py whose name is also that of a module of the package.

    Importing that module would put it in the function's place.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, package: ModuleType, owner: type) -> Any:
        return vars(package).get(self.name) or getattr(import_module("autopar.compile"), self.name)

    def __set__(self, package: ModuleType, value: object) -> None:
        if not isinstance(value, ModuleType):
            vars(package)[self.name] = value

    def __delete__(self, package: ModuleType) -> None:
        vars(package).pop(self.name, None)


class _Package(ModuleType):
    compile, plan = _Function(), _Function()


sys.modules[__name__].__class__ = _Package
