"""Parameters and buffers on one device: their shards, gradients and flat buffers."""
