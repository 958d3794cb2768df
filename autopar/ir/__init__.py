"""The intermediate representation: meshes, layouts, graphs, collectives; all frozen values."""
