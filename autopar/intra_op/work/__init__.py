"""Work of operators on one device, and savings of fused kernels."""
