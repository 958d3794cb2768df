"""Constraints that the user sets before planning: layouts, named dimensions, published plans."""
