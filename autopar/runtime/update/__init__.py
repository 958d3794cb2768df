"""From gradients to new parameters: optimizers, loss scaling, and checks of finite steps."""
