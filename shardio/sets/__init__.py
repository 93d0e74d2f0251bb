"""Sets at rest: named, found in catalogues and object stores, verified, published, counted.

Modules here take the folder, URL or name of a set and read, check or complete the set. They decode no image.
"""
