"""Shows a set to people: as the HTML page of a report, or as PNGs of samples with a table.

Commands call these functions with an opened set.
"""
