"""What people see of a set: the page of a report, and samples as files.

An opened set comes in; HTML, PNGs and tables come out. Commands call it.
"""
