"""When the tensors of a training step are alive, and the bytes that they take."""
