"""Proofs of sharding rules, and discovery of rules by running operators."""
