"""Code generation and the runtime that generated programs call."""
