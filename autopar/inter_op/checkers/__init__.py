"""Independent checkers of rows: deadlocks, and weights overwritten while still needed."""
