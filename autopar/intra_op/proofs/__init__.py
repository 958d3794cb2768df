"""Proofs of sharding rules, and rules that are discovered by running operators."""
