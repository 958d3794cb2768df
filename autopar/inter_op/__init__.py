"""Parallelism between operators: a model cut into stages that pass microbatches on.

Nothing here imports torch: a schedule is data, and what a stage costs is passed in.
"""
