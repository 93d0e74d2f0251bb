"""Writes the files of a set: shards, indexes, and last the manifest."""
