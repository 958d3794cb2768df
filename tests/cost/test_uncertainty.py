"""The errors of the tables become the range of a prediction."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.cost.device import devices
from autopar.cost.uncertainty import TAKEN_OVER, UNMEASURED, error_seconds, relative_error

KNOWN = {entry.name: entry for entry in devices()}


def test_a_fitted_device_is_off_by_what_was_held_out() -> None:
    chip = KNOWN["H100"]
    assert relative_error(chip, "products") == chip.products.error
    assert chip.links is not None
    expected = 2.0 * chip.products.error + 3.0 * chip.links.error
    assert error_seconds(chip, 2.0, 3.0) == pytest.approx(expected)


def test_a_row_of_few_measurements_is_as_uncertain_as_what_it_takes_over() -> None:
    chip = KNOWN["H100-PCIe"]
    assert chip.products.error < TAKEN_OVER * KNOWN["H100"].products.error
    expected = TAKEN_OVER * KNOWN["H100"].products.error
    assert relative_error(chip, "products") == pytest.approx(expected)
    assert relative_error(KNOWN["L40S"], "products") == UNMEASURED


def test_what_is_taken_over_or_unmeasured_is_less_certain() -> None:
    for table in ("products", "attention", "links"):
        own = relative_error(KNOWN["H100"], table)
        assert relative_error(KNOWN["H200"], table) == pytest.approx(TAKEN_OVER * own)
    assert relative_error(KNOWN["cpu"], "links") == UNMEASURED
    unknown = dataclasses.replace(KNOWN["H100"], links=None)
    assert relative_error(unknown, "links") == UNMEASURED
