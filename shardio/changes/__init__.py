"""Sets made from other sets without rewriting a pixel: attach, select, drop, relabel, merge, diff.

`parents` reads what is there, and each operation makes a `draft` of it: values in memory that say which files the new
set has and what stands in its indexes and orders. `carry` makes a folder of a draft, whole or not at all.
"""
