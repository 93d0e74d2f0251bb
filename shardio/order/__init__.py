"""The samples of each step and rank, computed from (seed, epoch, rank, position).

Functions take integers and return arrays of sample indices. No files, no threads, no torch.
"""
