"""This process among its peers: their process groups, what it did last, and what became of them."""
