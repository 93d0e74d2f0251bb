"""Sets at rest: named, found in catalogues and object stores, verified, published, counted.

It takes the folder, URL or name of a set, and reads the set, or makes it whole. It decodes no image.
"""
