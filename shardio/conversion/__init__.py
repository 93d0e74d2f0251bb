"""Converts images or arrays into a published set. The entry point is `convert`.

`sources` lists the images, `images` decodes them, `writing` writes the set, and `engine` runs the tasks on threads,
processes or a cluster.
"""
