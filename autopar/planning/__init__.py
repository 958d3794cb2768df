"""Plans a graph by the optimisers of `intra_op` and `inter_op`.

`planner` plans one program on a whole mesh, `pipelines/stages` a pipeline with given cuts, and
`pipelines/search` a pipeline whose cuts, sub-meshes, microbatches and schedule are searched for.
"""
