"""One HTML page about a set, with all that it needs inside: facts come in, and the bytes of the page come out.

Names, keys and the provenance come from others. `html` escapes all text, and the page forbids every script and style
but its own two files.
"""
