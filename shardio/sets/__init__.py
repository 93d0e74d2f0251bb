"""Sets at rest: named, found in folders and object stores, checked, published, counted.

Modules here take the folder, URL or name of a set, and read, check or complete the set. They decode no image.
"""
