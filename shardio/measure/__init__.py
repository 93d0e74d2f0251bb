"""Measures the loader next to the limits of the machine, in the same run."""
