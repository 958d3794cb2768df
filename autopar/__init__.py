"""autopar: any PyTorch model and a device mesh in, a program that trains it in parallel out."""

from autopar import outer, pins
from autopar.compile import compile, emit, load, plan
from autopar.intra_op.pins.named_dims import layout
from autopar.intra_op.rule import OpRule, rule
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.operators.annotation import shard
from autopar.plan import Plan
from autopar.runtime.checkpoint.plain import load_checkpoint
from autopar.runtime.ranks.dumps import Dump
from autopar.runtime.update.groups import groups
from autopar.session.compiled import Compiled
from autopar.session.session import Session

__all__ = [
    "Compiled",
    "Dump",
    "Mesh",
    "OpRule",
    "Plan",
    "Precision",
    "Session",
    "compile",
    "emit",
    "groups",
    "layout",
    "load",
    "load_checkpoint",
    "outer",
    "pins",
    "plan",
    "rule",
    "shard",
]
