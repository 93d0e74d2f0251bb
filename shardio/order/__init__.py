"""The samples of each step and rank: pure arithmetic on (seed, epoch, rank, position). No file, no thread, no torch.

It takes seeds and numbers, and returns arrays of sample indices.
"""
