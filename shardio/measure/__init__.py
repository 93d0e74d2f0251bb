"""Limits of the machine, speeds of the loader beside them, and the randomness of an order.

It times `loading` and `reading` beside limits that are measured in the same run.
"""
