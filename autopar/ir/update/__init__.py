"""The update of a step as a value: states of every parameter, and an optimizer's requirements."""

from autopar.ir.update.kept_states import LocalState, nbytes_in, shared_states, states_of
from autopar.ir.update.ownership import deal, owner_hops
from autopar.ir.update.update_rules import ADAMW, NO_STATES, OUTER, Products, Rule, State, Update

__all__ = [
    "ADAMW", "NO_STATES", "OUTER", "LocalState", "Products", "Rule", "State", "Update", "deal",
    "nbytes_in", "owner_hops", "shared_states", "states_of",
]  # fmt: skip
