"""Measures the loader next to the limits of the machine, and checks a machine for problems that would end a job.

The loader and the limits are measured in the same run.
"""
