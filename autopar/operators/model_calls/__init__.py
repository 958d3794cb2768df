"""Functions that a model's forward calls: `autopar.shard` and `autopar.mixture`."""
