"""The operators of the IR in torch: running a graph, and autopar's own operators."""
