"""The Triton kernels, one file each, imported as `autopar_kernels`.

This file must not import anything: from the project's root the folder is also importable as
`kernels`, the name of a package that `transformers` probes for and would import at start-up.
"""
