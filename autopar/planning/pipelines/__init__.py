"""Planning of pipelines: stages, sub-meshes, microbatches and schedule, chosen together."""
