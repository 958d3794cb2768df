"""Names of products as drivers spell them, and the devices that they are."""

from __future__ import annotations

import pytest

from autopar.cost.device import name_of_product

GB = 1e9
PRODUCTS = [
    ("NVIDIA H100 80GB HBM3", 85.0 * GB, "H100"),
    ("NVIDIA H100 PCIe", 85.0 * GB, "H100-PCIe"),
    ("NVIDIA H100", 101.5 * GB, "H100-96"),
    ("NVIDIA H200", 150.1 * GB, "H200"),
    ("NVIDIA A100-SXM4-80GB", 85.1 * GB, "A100-80"),
    ("NVIDIA A100 80GB PCIe", 85.1 * GB, "A100-80"),
    ("NVIDIA A100-PCIE-40GB", 42.4 * GB, "A100-40"),
    ("Tesla V100-SXM2-16GB", 16.9 * GB, "V100"),
    ("NVIDIA L40S", 47.7 * GB, "L40S"),
    ("NVIDIA GeForce RTX 4090", 25.3 * GB, "RTX-4090"),
    ("NVIDIA B200", 191.5 * GB, "B200"),
    ("AMD Instinct MI300X", 206.1 * GB, "MI300X"),
    ("NVIDIA GH200 480GB", 101.5 * GB, "NVIDIA-GH200-480GB"),  # not in devices.toml
    ("NVIDIA A30", 25.2 * GB, "NVIDIA-A30"),
]


@pytest.mark.parametrize(("product", "memory", "name"), PRODUCTS)
def test_products_of_drivers_are_found_in_the_table(product: str, memory: float, name: str) -> None:
    assert name_of_product(product, memory) == name
