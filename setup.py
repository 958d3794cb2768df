"""Lists the packages to install; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

KERNELS = ("autopar_kernels", "autopar_kernels.registry")
setup(packages=[*find_packages(include=["autopar", "autopar.*"]), *KERNELS])
