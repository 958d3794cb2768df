"""How a system runs kernels, as values."""
