"""Table look-ups: split by what is looked up or by the columns; the rows stay whole."""

from __future__ import annotations

from autopar.intra_op.rule import rule

RULES = (rule("aten.embedding", "v! h, ... -> ... h"),)
