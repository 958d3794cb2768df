"""Functions that run instead of torch's while a model is traced."""
