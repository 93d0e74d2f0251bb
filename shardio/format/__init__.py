"""A set on disk: the bytes of shards and indexes, the manifest, checksums, and checked opening of files.

docs/format.md is the normative text.
"""
