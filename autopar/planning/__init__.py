"""Planning: from a graph to a plan; where the optimisers of `intra_op` and `inter_op` meet.

`single` plans one program on a whole mesh, `stages` a pipeline whose cuts are given, `search`
one whose cuts, sub-meshes, microbatches and schedule are chosen too.
"""
