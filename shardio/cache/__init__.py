"""Copies of sets on a node's own disk: who uses and fills them, eviction, and splits read through them."""
