"""Converts images or arrays into a published set. The entry point is `convert`.

`sources` lists the images, `images` decodes them, `writing` writes the set, and `engines` runs the tasks on threads,
processes or a cluster.
"""
