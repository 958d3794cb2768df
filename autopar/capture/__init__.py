"""torch model -> Graph: tracing, in-place writes undone, refusals in the user's words."""
