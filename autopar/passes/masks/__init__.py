"""Masks of attention that are recognised."""
