"""Limits of the machine, the speed of the loader compared with them, and what would end a job.

It times `loading` and `reading`, and in the same run what the machine has to offer.
"""
