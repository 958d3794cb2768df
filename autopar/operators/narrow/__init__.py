"""Linears whose products are in 8 bits: as plans see them, and as devices run them."""
