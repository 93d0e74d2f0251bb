"""Sets made from other sets without rewriting a pixel: change and merge.

`parents` reads the old sets, and each operation returns a `draft`: values in memory that say which files the new set
has and what its indexes and orders hold. `carry` makes a folder from a draft, whole or not at all.
"""
