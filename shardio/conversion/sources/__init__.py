"""Scans SRC: one module for each kind of storage. A scan returns a Listing, which becomes a Collection."""
