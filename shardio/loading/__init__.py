"""Threads, slots and the device: `ShardLoader` brings batches to the training loop.

Uses the sample order of `shardio.order` and the readers of `shardio.reading`, and returns tensors.
"""
