"""Scans the kinds of storage that can be converted. Each scan returns a Collection of sources."""
