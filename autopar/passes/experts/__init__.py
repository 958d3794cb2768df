"""Passes that find mixtures of experts which a model computes one expert after another."""
