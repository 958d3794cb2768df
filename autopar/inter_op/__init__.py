"""Inter-operator parallelism: cuts a model into stages that run as a pipeline.

Nothing here imports torch: a schedule is data, and callers pass in the stage costs.
"""
