"""autopar compiles a PyTorch model and a device mesh into a program that trains it in parallel."""

from autopar import outer, pins
from autopar.compile import compile, emit, load, plan
from autopar.intra_op.pins.named_dims import layout
from autopar.intra_op.rule import OpRule, rule
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.operators.annotation import shard
from autopar.operators.mixture_call import mixture
from autopar.plan import Plan
from autopar.runtime.checkpoint.plain import load_checkpoint
from autopar.runtime.ranks.dumps import Dump
from autopar.runtime.update.groups import groups
from autopar.runtime.updates.muon import muon
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
    "mixture",
    "muon",
    "outer",
    "pins",
    "plan",
    "rule",
    "shard",
]
