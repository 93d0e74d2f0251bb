"""Threads, slots and the device: `ShardLoader` brings batches to the training loop.

It takes the order of `order` and the readers of `reading`, and gives tensors to the caller.
"""
