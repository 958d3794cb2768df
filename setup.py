"""Lists the packages to install; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["autopar", "autopar.*"]), "autopar_kernels"])
