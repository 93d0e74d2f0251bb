"""Draws pictures for people: on a sheet with captions, as thumbnails for HTML pages, or in a terminal.

Functions take pictures as uint8 arrays and captions as text, and return images or text. They do not depend on sets.
"""
