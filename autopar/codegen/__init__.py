"""Code generation: prints lowered programs as Python."""
