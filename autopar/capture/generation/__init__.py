"""Calls of models that generate: with a cache of keys and values, in place of their forward."""
