"""autopar: an auto-parallelization compiler for PyTorch."""
