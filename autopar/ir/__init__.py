"""The intermediate representation: meshes, layouts, graphs and collectives, all frozen values."""
