"""autopar: any PyTorch model and a device mesh in, a program that trains it in parallel out."""

from autopar.compile import Program, compile, plan
from autopar.ir.mesh import Mesh
from autopar.plan import Plan

__all__ = ["Mesh", "Plan", "Program", "compile", "plan"]
