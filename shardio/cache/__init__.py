"""Copies of sets on a node's own disk: who uses and fills them, what is evicted, and splits read through them."""
