"""What needs a GPU: how kernels are timed there, and their launches tuned."""
