"""What runs instead of functions of torch while a model is traced."""
