"""What the machine gives, what the loader makes of it, and how random an order is.

It times `loading` and `reading` beside limits that are measured in the same run.
"""
