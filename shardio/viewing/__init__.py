"""A set for people to look at: the HTML page of a report, and samples as PNGs and tables.

Commands call these functions with an opened set.
"""
