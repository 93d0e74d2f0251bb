"""Turns the bytes of an image into pixels: checks the header, decodes, and resizes to the size of the set."""
