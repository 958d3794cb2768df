"""Plans pipelines: searches for stages, sub-meshes, microbatches and schedule together."""
