"""Matrix products on grids of devices, of which each has a block of every matrix."""
