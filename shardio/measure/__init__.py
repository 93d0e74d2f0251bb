"""Measures how fast a loader reads a set, compared with the limits of the machine in the same run."""
