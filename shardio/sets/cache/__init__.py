"""Copies of sets on a node's own disk: who uses them, who fills them, what is evicted."""
