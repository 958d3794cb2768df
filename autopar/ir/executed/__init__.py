"""Values that say how a system runs kernels."""
