"""The compiler of the loops of reductions and solvers."""

from autopar.loops import entry, inner

__all__ = ["entry", "inner"]
