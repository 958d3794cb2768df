"""Measurements of a device, and the constants of price tables that are fitted to them."""
