"""From gradients to new parameters: optimizers, loss scaling, and finite steps."""
