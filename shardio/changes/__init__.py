"""Makes sets from other sets without rewriting a pixel: `change` and `merge`.

Both read the old sets as drafts and make the draft of the new set. A draft is a description in memory: which files the
set has, and what its indexes and orders hold. `carry` makes a folder from a draft, whole or not at all.
"""
